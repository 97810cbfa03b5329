#pragma once
// The CUDA device: one GPU, four streams, copies by the copy engines, kernels of kernels/cuda and
// cuBLASLt, and attention on host cores between them (host_work.h). Interface and rules are those of
// gpu_executor/device.h. Errors of a GPU are sticky: the first one fails (Exit::interrupted) out of
// whatever call meets it, and the process must end.

#include <memory>
#include <optional>
#include <string>

#include "gpu_executor/device.h"

namespace poise {

// Why this machine has no GPU that could be used, as part of a sentence; nothing where it has one.
std::optional<std::string> cuda_is_missing();

// The first GPU that CUDA_VISIBLE_DEVICES leaves visible. Fails with a sentence where there is none
// or cuBLAS is not found. `host_threads` attend on host cores: at least 1. `named`: the device's name tells how
// many.
std::unique_ptr<Device> open_cuda_device(int host_threads, bool named);

}  // namespace poise
