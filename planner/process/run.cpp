#include "planner/process/run.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "common/families/quantization.h"
#include "common/process.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/links/clock.h"

namespace poise {

Run::Run(RunOptions asked)
    : options(std::move(asked)),
      control(Control::attach(options.run_id)),
      publisher(control->progress[static_cast<int>(Process::planner)]),
      input(read_run_input(options.input)),
      input_lines(input.requests.line_numbers()),
      status_file(options.run_dir) {
  // How its weights are packed is the loader's to say.
  if (unpacked(control->shape) != unpacked(input.model.shape)) {
    fail(Exit::foreign, "the loader holds another model than {}", options.input.model.string());
  }
  grammars =
      std::make_unique<GrammarLink>(GrammarProgram{.python = options.grammar_python,
                                                   .script = options.grammar_script,
                                                   .model = options.input.model.string(),
                                                   .vocab_size = input.model.shape.vocab_size,
                                                   .eos = input.model.eos},
                                    stop_requested);
  if (!options.front_socket.empty()) {
    front = std::make_unique<FrontLink>(connect_frames(options.front_socket),
                                        rules_of(options.input, input));
    spdlog::info("requests come over {}", options.front_socket.string());
  } else {
    spdlog::info("{} and {} that {} none in {}", counted(input.requests.answerable(), "request"),
                 counted(input.requests.errors.size(), "line"),
                 input.requests.errors.size() == 1 ? "is" : "are", options.input.input.string());
  }
  status.run_id = options.run_id;
  status.state = "loading";
  status.planner_pid = getpid();
  status.requests = input.requests.lines();
}

Bytes Run::device_cap() const {
  const Bytes all = executor->greeting()->memory;
  return std::min(all, options.gpu_memory.value_or(all));
}

std::int32_t Run::released_layers() const {
  return static_cast<std::int32_t>(control->released_layers.load(std::memory_order_acquire));
}

std::vector<RequestSize> Run::sizes(const std::vector<const Request*>& requests) const {
  if (!front) {
    return sizes_of(requests);
  }
  // Half of the context is the prompt's, as good a guess as any; buffers suffice for every other share.
  const std::int32_t context = rules_of(options.input, input).context;
  const std::int32_t prompt = std::max(context / 2, 1);
  return std::vector<RequestSize>(static_cast<std::size_t>(options.batch.max_num_seqs),
                                  {.id = {1},
                                   .prompt = prompt,
                                   .answer = context - prompt + 1,
                                   .edits = shape().vocab_size + mask_edits(shape().vocab_size)});
}

void Run::write(const std::vector<ResultLine>& lines) {
  for (const ResultLine& line : lines) {
    if (front) {
      front->finish(line);
      std::erase_if(to_do, [&](const Request* one) { return one->line() == line.request; });
      ++status.done;
      status.errors += line.error ? 1 : 0;
      continue;
    }
    results->append(line.request, line.error, line.text, monotonic_now());
  }
}

bool Run::step_executor(Seconds wait) {
  const bool moved = executor->step(wait);
  if (executor->gone() && options.death_descriptor < 0) {
    fail(Exit::interrupted, "the gpu_executor is gone");
  }
  return moved;
}

void Run::print(const std::string& text) const {
  fmt::print("{}", text);
  std::fflush(stdout);
  spdlog::info("{}", text);
}

}  // namespace poise
