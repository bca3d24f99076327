"""Miss policies: how a demanded expert that is not resident is served."""
