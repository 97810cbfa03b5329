#include "planner/profile/profile_run.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "common/families/absorption.h"
#include "common/process.h"
#include "common/trouble.h"
#include "planner/links/clock.h"
#include "planner/links/stale_memory.h"
#include "planner/memory/sizes.h"

namespace poise {
namespace {

constexpr Seconds kProfileWait{0.1};
constexpr Seconds kProfileShortWait{0.005};

}  // namespace

ProfileRun::ProfileRun(ProfileOptions options)
    : options_(std::move(options)),
      control_(Control::attach(options_.run_id)),
      status_file_(options_.run_dir) {
  status_.run_id = options_.run_id;
  status_.state = "measuring";
}

bool ProfileRun::step() {
  if (stop_requested()) {
    leave("interrupted");
    return false;
  }
  control_->progress[static_cast<int>(Process::planner)].steps.fetch_add(1,
                                                                         std::memory_order_release);
  if (!links_.loader) {
    if (!weights_sealed(*control_)) {
      usleep(static_cast<useconds_t>(kProfileShortWait.n * 1e6));
      return true;
    }
    log_ = open_order_log(options_.run_dir / "orders.log",
                          order_log_header(*control_, options_.run_id, options_.kv_format));
    links_ = open_links(*control_, options_.run_id, options_.executor_socket,
                        options_.loader_socket, options_.host_memory, options_.kv_format, *log_);
  } else if (!profiler_) {
    links_.loader->step(links_.loader->greeted() ? Seconds{0} : kProfileShortWait);
    links_.executor->step(links_.executor->greeting() ? Seconds{0} : kProfileShortWait);
    if (links_.loader->greeted() && links_.executor->greeting() && host_is_in_order()) {
      profiler_ = std::make_unique<Profiler>(
          profiled_machine(*control_, *links_.executor->greeting(), options_.gpu_memory,
                           options_.host_memory, options_.kv_format),
          *control_, *links_.loader, *links_.executor);
    }
  } else if (profiler_->step(kProfileWait); profiler_->done()) {
    profile_ = profiler_->profile();
    write_profile(options_.output, *profile_);
    leave("all is measured");
    outcome_ = Exit::done;
    return false;
  }
  status_.measured = profiler_ ? profiler_->share() : 0;
  status_file_.write(status_, monotonic_now());
  return true;
}

bool ProfileRun::host_is_in_order() {
  if (links_.loader->gives_back() || links_.loader->asked_for_weights()) {
    return false;
  }
  const StaleMemory left = find_stale_memory(*control_, *links_.executor->greeting(), false);
  if (left.anything()) {
    reclaim(*links_.loader, left);
  }
  return !left.anything();
}

void ProfileRun::leave(const std::string& reason) {
  if (links_.loader) {
    links_.loader->release();
  }
  if (links_.executor && options_.death_descriptor < 0) {
    links_.executor->stop(reason);
  }
}

ProfiledMachine profiled_machine(const ControlSegment& control,
                                 const ExecutorLink::Greeting& device,
                                 const std::optional<Bytes>& gpu_memory,
                                 const std::optional<Bytes>& host_memory, KvFormat kv_format) {
  const Bytes weights{static_cast<std::int64_t>(control.weights_bytes)};
  const Bytes available = memory_for_blocks(control);
  const Bytes free =
      bytes_for_blocks({.weights = weights, .available = available, .host_memory = host_memory});
  return {.shape = control.shape,
          .dtype = control.dtype,
          .kv_format = kv_format,
          .device = device.device,
          .kind = device.kind,
          .gpu_memory = std::min(device.memory, gpu_memory.value_or(device.memory)),
          .gpu_overhead = device.overhead,
          .host_free = free,
          .host_memory = available + weights,
          .attends_on_host = device.host_threads > 0,
          .absorbs = !why_not_absorbed(control.shape, kv_format)};
}

void keep_profile(const std::filesystem::path& folder, const Profile& profile) {
  try {
    std::filesystem::create_directories(folder);
    write_profile(kept_profile(folder, profile.fingerprint), profile);
  } catch (const std::exception& problem) {
    spdlog::warn("the profile is not kept: {}", problem.what());
  }
}

std::filesystem::path kept_profile(const std::filesystem::path& folder,
                                   std::string_view fingerprint) {
  return folder / fmt::format("{}.json", fingerprint.substr(0, 16));
}

}  // namespace poise
