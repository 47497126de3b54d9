# SPDX-License-Identifier: Apache-2.0
"""Runs of an evaluation: options, plan, servers, requests, and the folder with the results."""
