#pragma once
// How the planner meets the other two: as the run's planner, on the sockets that the supervisor chose.

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "common/shared_memory.h"
#include "planner/links/executor_link.h"
#include "planner/links/loader_link.h"

namespace poise {

struct Links {
  std::unique_ptr<ExecutorLink> executor;
  std::unique_ptr<LoaderLink> loader;
};

// REQUIRES: the loader has sealed the weights. `host_memory`: the run's cap. `kv_format`: of its KV blocks.
// `log` outlives the links.
Links open_links(const ControlSegment& control, const std::string& run_id,
                 const std::filesystem::path& executor_socket,
                 const std::filesystem::path& loader_socket, std::optional<Bytes> host_memory,
                 KvFormat kv_format, OrderLog& log);

// Whether the loader's weights and their fingerprint are there. Fails if the loader ends before, or if
// the control segment describes no model (model_in): from then on its shape may be used.
bool weights_sealed(const ControlSegment& control);

// The header of the run's order log.
std::string order_log_header(const ControlSegment& control, const std::string& run_id,
                             KvFormat kv_format);
// Continues or begins a log. No result depends on it: a log that cannot be continued (after a loss of
// power, for example) is renamed, with a message.
std::unique_ptr<OrderLog> open_order_log(const std::filesystem::path& path,
                                         const std::string& header,
                                         const OrderLogLimits& limits = {});

}  // namespace poise
