#pragma once
// All that a run or `validate` reads from disk before any other process is needed: the model's
// configuration and tokenizer, and every request. Whatever is wrong with these files is found here.

#include <memory>
#include <optional>

#include "common/model_config.h"
#include "planner/options.h"
#include "planner/request_file.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {

struct RunInput {
  ModelConfig model;
  std::unique_ptr<const Tokenizer> tokenizer;  // null with --skip-tokenizer-init
  RequestFile requests;
};

RunInput read_run_input(const InputOptions& options);

}  // namespace poise
