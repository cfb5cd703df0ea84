SEGMENT_VARIABLE = "SPECDEC_SEGMENT"  # tells the plug-ins in vLLM's processes where the pair's segment is
