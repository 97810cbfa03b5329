#include "planner/costs/costs.h"

#include <system_error>
#include <utility>

#include "common/trouble.h"
#include "planner/costs/machine_file.h"

namespace poise {
std::optional<Profile> named_costs(const CostOptions& costs, const ModelShape& shape, DType dtype,
                                   KvFormat kv_format) {
  if (costs.machine) {
    return costs_on(*costs.machine, shape, dtype, kv_format);
  }
  if (costs.profile) {
    return read_profile_of(*costs.profile, shape, dtype, kv_format);
  }
  return std::nullopt;
}

std::optional<KeptProfile> newest_kept_profile(const std::filesystem::path& folder,
                                               const KeptFor& wanted) {
  const std::string model = model_fingerprint(wanted.shape, wanted.dtype, wanted.kv_format);
  const auto is_wanted = [&](const Profile& profile) {
    return profile.model == model && profile.kind == wanted.device.value_or(profile.kind) &&
           profile.build == wanted.build.value_or(profile.build);
  };
  std::optional<KeptProfile> found;
  std::filesystem::file_time_type newest;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    if (entry.path().extension() != ".json") {
      continue;
    }
    try {
      const auto written = entry.last_write_time();
      Profile profile = read_profile(entry.path());
      if (is_wanted(profile) && (!found || written > newest)) {
        found = KeptProfile{entry.path(), std::move(profile)};
        newest = written;
      }
    } catch (const Failure&) {                            // of another version
    } catch (const std::filesystem::filesystem_error&) {  // replaced or removed meanwhile
    }
  }
  return found;
}

}  // namespace poise
