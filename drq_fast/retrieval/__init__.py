"""The paper's image retrieval: features with intermediate supervision, three-stage training, mAP at every length."""
