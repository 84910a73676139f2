"""Weights as users see them: whole where they are asked for, an error where they are not, ordinary after the fit."""
