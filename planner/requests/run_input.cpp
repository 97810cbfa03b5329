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
  input.requests = read_requests(
      options.input,
      {.context = std::min(options.max_model_len.value_or(shape.max_position_embeddings),
                           shape.max_position_embeddings),
       .vocab_size = shape.vocab_size,
       .tokenizer = input.tokenizer.get(),
       .run_seed = options.seed,
       .model = options.served_model_name},
      0, options.chat_prompts);
  return input;
}

}  // namespace poise
