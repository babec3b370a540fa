"""Replay routing traces through a simulated PCIe link, expert cache and GPU, under any offloading policy."""
