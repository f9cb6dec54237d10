"""Scoring responses: functions and verifiers."""
