"""The parity suite: captures of foreign implementations against our references and kernels, judged through the truth."""
