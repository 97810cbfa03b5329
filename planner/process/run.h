#pragma once
// What all parts of the planner's process share of a run: its options, files, peers and progress. Every
// part holds a reference; the Planner owns it. Members below the line are filled in the order of the
// phases (planner.h). One thread.

#include <memory>
#include <optional>
#include <vector>

#include "common/liveness/progress.h"
#include "common/order_log.h"
#include "common/shared_memory.h"
#include "planner/links/executor_link.h"
#include "planner/links/front_link.h"
#include "planner/links/grammar_link.h"
#include "planner/links/loader_link.h"
#include "planner/links/status.h"
#include "planner/process/run_options.h"
#include "planner/requests/run_input.h"
#include "planner/results/answer_book.h"
#include "planner/results/results_file.h"

namespace poise {

struct Run {
  // Fails if model or input are wrong. The loader's control segment must
  // exist.
  explicit Run(RunOptions options);

  RunOptions options;
  Control control;
  ProgressPublisher publisher;
  RunInput input;
  std::vector<RequestId> input_lines;
  RunStatus status;
  StatusFile status_file;
  // ----
  std::optional<ResultsFile> results;  // once the weights' fingerprint is known; never with a front
  // Requests without a result: of a file when this process began, of a front now.
  std::vector<const Request*> to_do;
  std::unique_ptr<FrontLink> front;  // only if requests come while the run goes on
  std::unique_ptr<GrammarLink> grammars;
  std::unique_ptr<OrderLog> order_log;
  std::unique_ptr<LoaderLink> loader;
  std::unique_ptr<ExecutorLink> executor;

  const ModelShape& shape() const { return control->shape; }
  DType dtype() const { return control->dtype; }
  WeightLayout layout() const { return weight_layout(shape(), dtype()); }
  KvFormat kv_format() const { return options.batch.kv_format; }
  BlockSizes block_sizes() const { return poise::block_sizes(shape(), dtype(), kv_format()); }
  // REQUIRES: the executor has greeted.
  bool device_is_host() const { return executor->greeting()->kind == DeviceKind::cpu; }
  Bytes device_cap() const;
  // What memory is planned for: `requests`, or with a front as many of the longest as may run at a time.
  std::vector<RequestSize> sizes(const std::vector<const Request*>& requests) const;
  // Layers whose weights the executor's device holds and the host does not.
  std::int32_t released_layers() const;

  void write(const std::vector<ResultLine>& lines);
  // Without a supervisor no process starts another executor: fails if this one is gone.
  bool step_executor(Seconds wait);
  // Prints one line for the user at once, and logs it.
  void print(const std::string& text) const;
};

}  // namespace poise
