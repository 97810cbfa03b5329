#include "planner/requests/run_input.h"

#include <algorithm>

namespace poise {

RunInput read_run_input(const InputOptions& options) {
  RunInput input;
  input.model = read_model_config(options.model);
  const ModelShape& shape = input.model.shape;
  if (!options.skip_tokenizer_init) {
    input.tokenizer =
        std::make_unique<const Tokenizer>(Tokenizer::load(options.model, shape.vocab_size));
  }
  if (!options.input.empty()) {
    input.requests =
        read_requests(options.input, rules_of(options, input), 0, options.chat_prompts);
  }
  return input;
}

RequestRules rules_of(const InputOptions& options, const RunInput& input) {
  const ModelShape& shape = input.model.shape;
  return {.context = std::min(options.max_model_len.value_or(shape.max_position_embeddings),
                              shape.max_position_embeddings),
          .vocab_size = shape.vocab_size,
          .tokenizer = input.tokenizer.get(),
          .run_seed = options.seed,
          .eos = input.model.eos,
          .model = options.served_model_name};
}

}  // namespace poise
