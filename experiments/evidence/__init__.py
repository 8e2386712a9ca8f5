"""How well salience finds gold evidence: methods, cross-validation, intervals."""
