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

// Which of the profiles kept in a folder are asked for.
struct KeptFor {
  ModelShape shape{};
  DType dtype{};
  std::optional<DeviceKind> device;  // measured on such a one; nothing: on any
  std::optional<std::string> build;  // measured by this one; nothing: by any
};
struct KeptProfile {
  std::filesystem::path file;
  Profile profile;
};
// The newest of them.
std::optional<KeptProfile> newest_kept_profile(const std::filesystem::path& folder,
                                               const KeptFor& wanted);

}  // namespace poise
