"""The drafter: configuration, model, anchors, mask, objectives and metrics; pure tensors, no training, no threads."""
