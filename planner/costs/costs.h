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

// Which of the profiles kept in a folder are wanted.
struct KeptFor {
  ModelShape shape{};
  DType dtype{};
  std::optional<DeviceKind> device;  // measured on such a device; nothing: on any
  std::optional<std::string> build;  // measured by this build; nothing: by any
};
struct KeptProfile {
  std::filesystem::path file;
  Profile profile;
};
// The newest of them.
std::optional<KeptProfile> newest_kept_profile(const std::filesystem::path& folder,
                                               const KeptFor& wanted);

}  // namespace poise
