#pragma once
// How much of a GPU's memory is taken, asked without making a context there: the driver's management
// library (NVML), found at run time. With it the device knows what its own context and libraries
// took, even while other processes use the GPU.

#include <optional>
#include <string>

#include "common/units.h"

namespace poise {

// Bytes in use on the GPU with that PCI bus id, by all processes; nothing where NVML does not say.
std::optional<Bytes> gpu_memory_in_use(const std::string& pci_bus_id);

}  // namespace poise
