#pragma once
// Costs from options and from files: those that the user names, and for `plan`, which has no device, the
// newest kept profile that fits. A run decides in process/preparation.cpp whether it takes the kept
// profile of its device or measures. Reads profiles' files; otherwise pure.

#include <filesystem>
#include <optional>
#include <string>

#include "planner/costs/cost_model.h"

namespace poise {

// What the user said about costs.
struct CostOptions {
  std::optional<std::string> machine;            // a named machine, or a file that describes one
  std::optional<std::filesystem::path> profile;  // or measured ones, a file
};

// The costs of the named machine or file; nothing if none was named. Fails if the file is no profile
// of this model.
std::optional<Profile> named_costs(const CostOptions& costs, const ModelShape& shape, DType dtype,
                                   KvFormat kv_format = KvFormat::plain);

// Which of the profiles kept in a folder are wanted.
struct KeptFor {
  ModelShape shape{};
  DType dtype{};
  std::optional<DeviceKind> device;  // measured on such a device; nothing: on any
  std::optional<std::string> build;  // measured by this build; nothing: by any
  KvFormat kv_format = KvFormat::plain;
};
struct KeptProfile {
  std::filesystem::path file;
  Profile profile;
};
// The newest of them.
std::optional<KeptProfile> newest_kept_profile(const std::filesystem::path& folder,
                                               const KeptFor& wanted);

}  // namespace poise
