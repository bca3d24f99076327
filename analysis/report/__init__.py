"""A sweep or a replay as one HTML page that needs no network: `page.page` is the interface."""
