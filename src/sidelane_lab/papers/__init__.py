"""Papers: what each claims and draws, held against the model; and predictions of the same studies for any machine."""
