#pragma once
// By whose costs a run decides: the same for `run`, which asks its device, and for `plan`, which has none. Reads profiles' files; else pure.

#include <filesystem>
#include <optional>
#include <string>

#include "planner/costs/cost_model.h"

namespace poise {

// What the user said of costs.
struct CostOptions {
  std::optional<std::string> machine;            // a named machine's constants
  std::optional<std::filesystem::path> profile;  // or measured ones, a file
};

// Of the machine or the file that was named; nothing where none was. Fails where the file is no
// profile of this model.
std::optional<Profile> named_costs(const CostOptions& costs, const ModelShape& shape, DType dtype);

// A profile's device, as --device names it.
enum class DeviceChoice { any, cpu, cuda };
bool is_of(const Profile& profile, DeviceChoice device);

// The newest of those kept for the model, measured on such a device.
std::optional<Profile> newest_kept_profile(const std::filesystem::path& folder,
                                           const ModelShape& shape, DType dtype,
                                           DeviceChoice device);

}  // namespace poise
