"""Tercet beside what a user would pick instead, on one CPU, in one run. Start with README.md."""
