#include "planner/links/greeting.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "common/files/json.h"
#include "common/files/sha256.h"
#include "common/trouble.h"
#include "common/windows/unseen_blocks.h"
#include "planner/links/clock.h"

namespace poise {
namespace {

// Grows with each planner of this machine's uptime, in steps of 10 ms; never 0.
std::uint32_t planner_epoch() {
  return std::max<std::uint32_t>(
      1, static_cast<std::uint32_t>(static_cast<std::uint64_t>(monotonic_now().n * 100)));
}

}  // namespace

Links open_links(const ControlSegment& control, const std::string& run_id,
                 const std::filesystem::path& executor_socket,
                 const std::filesystem::path& loader_socket, std::optional<Bytes> host_memory,
                 KvFormat kv_format, OrderLog& log) {
  const Identity identity{.run_id = run_id, .layout_hash = control.layout_hash};
  const Epochs epochs{.planner = planner_epoch(), .executor = 0};
  Links links;
  auto executor = serve(executor_socket.string(), identity);
  executor->set_epochs(epochs);
  links.executor =
      std::make_unique<ExecutorLink>(std::move(executor), log, control.shape.num_hidden_layers,
                                     block_sizes(control.shape, control.dtype, kv_format));
  auto loader = connect(loader_socket.string(), identity);
  loader->set_epochs(epochs);
  messages::HelloT hello;
  hello.protocol = kProtocol;
  hello.build = build_id();
  hello.layout_hash = control.layout_hash;
  hello.fingerprint.assign(std::begin(control.fingerprint), std::end(control.fingerprint));
  hello.process = static_cast<std::uint32_t>(Process::planner);
  hello.pid = static_cast<std::uint32_t>(getpid());
  links.loader =
      std::make_unique<LoaderLink>(std::move(loader), std::move(hello), host_memory, kv_format);
  return links;
}

bool weights_sealed(const ControlSegment& control) {
  const auto state = static_cast<LoaderState>(control.loader_state.load(std::memory_order_acquire));
  if (state == LoaderState::draining) {
    fail(Exit::interrupted, "the loader ended before the model was loaded");
  }
  if (state != LoaderState::sealed ||
      control.fingerprint_ready.load(std::memory_order_acquire) == 0) {
    return false;
  }
  model_in(control);
  return true;
}

std::string order_log_header(const ControlSegment& control, const std::string& run_id,
                             KvFormat kv_format) {
  const BlockSizes sizes = block_sizes(control.shape, control.dtype, kv_format);
  const WeightLayout layout = weight_layout(control.shape, control.dtype);
  nlohmann::ordered_json header{{"run_id", run_id},
                                {"build", build_id()},
                                {"model", to_hex(std::to_array(control.fingerprint))},
                                {"dtype", std::string(name_of(control.dtype))},
                                {"kv_cache_dtype", std::string(name_of(kv_format))},
                                {"layers", control.shape.num_hidden_layers},
                                {"hidden_size", control.shape.hidden_size},
                                {"kv_row_bytes", sizes.kv_row.n},
                                {"act_row_bytes", sizes.act_row.n}};
  if (const std::int32_t window = window_of_all(control.shape); window > 0) {
    header["window"] = window;  // blocks before it are dropped
  }
  for (const WeightPiece& piece : layout.layer.pieces) {
    header["piece_bytes"].push_back(piece.bytes.n);
  }
  return header.dump();
}

std::unique_ptr<OrderLog> open_order_log(const std::filesystem::path& path,
                                         const std::string& header, const OrderLogLimits& limits) {
  try {
    return std::make_unique<OrderLog>(path, header, limits);
  } catch (const Failure& failure) {
    if (failure.code() != Exit::cannot_start) {  // it cannot be written
      throw;
    }
    const auto files = segment_files(path);
    const std::filesystem::path damaged = files.empty() ? path : files.back();
    std::filesystem::path aside = damaged;
    aside += ".damaged";
    std::filesystem::rename(damaged, aside);
    fmt::print("{}; it is kept as {}, a new one begins\n", failure.what(),
               aside.filename().string());
    std::fflush(stdout);
    spdlog::warn("{}", failure.what());
  }
  return std::make_unique<OrderLog>(path, header, limits, true);
}

}  // namespace poise
