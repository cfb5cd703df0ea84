"""The shared-memory channel of a pair. It knows nothing of models: tokens are int32, the rest is counts and times."""
