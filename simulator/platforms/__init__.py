"""Platform presets: one TOML file each, every figure with its source. Adding one is a file here and its name below."""

NAMES = ("a100-5gbps", "rtx4090-pcie4", "h100-pcie5", "h200-pcie5", "phone-ufs4", "mac-nvme", "jetson-orin")
