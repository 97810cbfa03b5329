#include "planner/costs/costs.h"

#include <system_error>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

bool is_host(const Profile& profile) { return profile.name.starts_with("cpu"); }

}  // namespace

std::optional<Profile> named_costs(const CostOptions& costs, const ModelShape& shape, DType dtype) {
  if (costs.machine) {
    return profile_of(machine_named(*costs.machine), shape, dtype);
  }
  if (costs.profile) {
    return read_profile_of(*costs.profile, shape, dtype);
  }
  return std::nullopt;
}

bool is_of(const Profile& profile, DeviceChoice device) {
  return device == DeviceChoice::any || (device == DeviceChoice::cpu) == is_host(profile);
}

std::optional<Profile> newest_kept_profile(const std::filesystem::path& folder,
                                           const ModelShape& shape, DType dtype,
                                           DeviceChoice device) {
  const std::string model = model_fingerprint(shape, dtype);
  std::optional<Profile> found;
  std::filesystem::file_time_type newest;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    if (entry.path().extension() != ".json") {
      continue;
    }
    try {
      const auto written = entry.last_write_time();
      Profile profile = read_profile(entry.path());
      if (profile.model == model && is_of(profile, device) && (!found || written > newest)) {
        found = std::move(profile);
        newest = written;
      }
    } catch (const Failure&) {                            // of another version
    } catch (const std::filesystem::filesystem_error&) {  // replaced or removed meanwhile
    }
  }
  return found;
}

}  // namespace poise
