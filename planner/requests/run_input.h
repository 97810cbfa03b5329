#pragma once
// Everything that a run or `validate` reads from disk before it needs another process: the model's
// configuration and tokenizer, and every request. All errors in these files are found here.

#include <memory>
#include <optional>

#include "common/model_config.h"
#include "planner/requests/request_file.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {

// Where a run's answers come from; also all that `validate` needs.
struct InputOptions {
  std::filesystem::path model;
  std::filesystem::path input;  // empty: requests come while the run goes on
  std::optional<std::int32_t> max_model_len;  // tokens of prompt and answer together
  std::string served_model_name;              // empty: the user gave the model no name
  std::uint64_t seed = 0;
  bool skip_tokenizer_init = false;
  std::optional<std::filesystem::path>
      chat_prompts;  // rendered by the supervisor; nothing: no chat lines
};

struct RunInput {
  ModelConfig model;
  std::unique_ptr<const Tokenizer> tokenizer;  // null with --skip-tokenizer-init
  RequestFile requests;
};

RunInput read_run_input(const InputOptions& options);
// What requests are checked against. `input` outlives the rules.
RequestRules rules_of(const InputOptions& options, const RunInput& input);

}  // namespace poise
