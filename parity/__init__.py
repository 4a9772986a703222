"""The parity suite: foreign captures against our references and kernels, judged through the truth."""
