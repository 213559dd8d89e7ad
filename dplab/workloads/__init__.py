"""Models, corpora and the training program that the command line and the notebooks run."""
