"""Learning: advantages, optimiser steps, and the phases of a run."""
