"""Figures of papers: rows of replays as a paper lays them out (`rows`), and the page that shows them (`page`)."""
