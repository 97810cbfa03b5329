#pragma once
// Chooses the costs that a run decides by, the same way for `run`, which asks its device, and for
// `plan`, which has none. Reads profiles' files; otherwise pure.

#include <filesystem>
#include <optional>
#include <string>

#include "planner/costs/cost_model.h"

namespace poise {

// What the user said about costs.
struct CostOptions {
  std::optional<std::string> machine;            // a named machine's constants
  std::optional<std::filesystem::path> profile;  // or measured ones, a file
};

// The costs of the named machine or file; nothing if none was named. Fails if the file is no profile
// of this model.
std::optional<Profile> named_costs(const CostOptions& costs, const ModelShape& shape, DType dtype);

// A profile's device, as --device names it.
enum class DeviceChoice { any, cpu, cuda };
bool is_of(const Profile& profile, DeviceChoice device);

// The newest kept profile of the model, measured on such a device.
std::optional<Profile> newest_kept_profile(const std::filesystem::path& folder,
                                           const ModelShape& shape, DType dtype,
                                           DeviceChoice device);

}  // namespace poise
