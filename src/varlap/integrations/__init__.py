"""Where people already are: estimators for scikit-learn."""
