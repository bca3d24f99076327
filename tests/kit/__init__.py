"""What tests are made with, and what strangers can run of it."""
