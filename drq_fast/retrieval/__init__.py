"""The paper's image retrieval: supervised features, three-stage training, and mAP at every code length."""
