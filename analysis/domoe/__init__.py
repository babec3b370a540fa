"""The DoMoE paper's tables and figures, each measured here and shown beside what the paper reports."""
