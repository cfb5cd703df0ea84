SEGMENT_VARIABLE = "SPECDEC_SEGMENT"  # tells the plug-ins in vLLM's processes where the pair's segment is
HEAD_VARIABLE = "SPECDEC_HEAD"  # and which folder has the config of the head the draft runs
