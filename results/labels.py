"""What seconds are called wherever they are shown."""

#: Of such as do not rest on measured prices.
ESTIMATE = "an estimate, not calibrated"
