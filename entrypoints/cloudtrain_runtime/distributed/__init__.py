"""How a model is spread over the ranks: replicated, sharded, split by tensor and by stage."""
