// The fields of OpenAI's and vLLM's completion request that poise does not follow and that would
// change the answer. A field that is neither here nor read in request_body.cpp is ignored, as vLLM
// ignores it: it steers the service (`user`, `stream_options`, `priority`, `cache_salt` …), or is
// unknown.

#include <array>
#include <span>

#include "common/trouble.h"
#include "planner/requests/request_body.h"

namespace poise {
namespace {

// The values that leave the answer as it is, beside null.
enum class Harmless {
  none,
  no,             // false
  nothing_in_it,  // an empty list or object
};

struct Unsupported {
  std::string_view name;
  Harmless harmless;
};

constexpr std::array kUnsupportedFields{
    Unsupported{"stream", Harmless::no},
    Unsupported{"suffix", Harmless::none},
    Unsupported{"repetition_detection", Harmless::none},
    Unsupported{"use_beam_search", Harmless::no},
    Unsupported{"watermarking", Harmless::no},
    Unsupported{"logits_processors", Harmless::nothing_in_it},
    Unsupported{"logprob_token_ids", Harmless::none},
    Unsupported{"prompt_embeds", Harmless::nothing_in_it},
    Unsupported{"structural_tag", Harmless::none},
};

// As vLLM had them before "structured_outputs".
constexpr std::array kGuided{"guided_json", "guided_regex", "guided_choice", "guided_grammar"};

// Of chat requests. Ignored like other unknown ones: "parallel_tool_calls", "store", "metadata" …
constexpr std::array kUnsupportedChatFields{
    Unsupported{"chat_template", Harmless::none},
    Unsupported{"documents", Harmless::nothing_in_it},
    Unsupported{"functions", Harmless::nothing_in_it},
    Unsupported{"function_call", Harmless::none},
    Unsupported{"audio", Harmless::none},
    Unsupported{"prediction", Harmless::none},
    Unsupported{"reasoning_effort", Harmless::none},
    Unsupported{"web_search_options", Harmless::none},
    Unsupported{"echo", Harmless::no},
    Unsupported{"add_special_tokens", Harmless::no},
    Unsupported{"score_from", Harmless::none},
};

bool leaves_the_answer(const nlohmann::json& value, Harmless harmless) {
  switch (harmless) {
    case Harmless::none:
      return false;
    case Harmless::no:
      return value.is_boolean() && !value.get<bool>();
    case Harmless::nothing_in_it:
      return (value.is_array() || value.is_object()) && value.empty();
  }
  return false;
}

void refuse_all_of(std::span<const Unsupported> fields, const RequestFields& body) {
  for (const Unsupported& field : fields) {
    const nlohmann::json* value = body.find(field.name);
    if (value != nullptr && !leaves_the_answer(*value, field.harmless)) {
      body.refuse(
          field.name,
          fmt::format("is not supported and would change the answer: {}", described(*value)),
          kUnsupported);
    }
  }
}

}  // namespace

void refuse_unsupported(const RequestFields& body) {
  refuse_all_of(kUnsupportedFields, body);
  for (const std::string_view name : kGuided) {
    if (body.find(name) != nullptr) {
      body.refuse(name,
                  fmt::format("is not supported: write \"structured_outputs\": {{\"{}\": …}}",
                              name.substr(name.find('_') + 1)),
                  kUnsupported);
    }
  }
}

void refuse_unsupported_in_chat(const RequestFields& body) {
  refuse_all_of(kUnsupportedChatFields, body);
  const nlohmann::json* choice = body.find("tool_choice");
  if (choice != nullptr && *choice != "auto" && *choice != "none") {
    body.refuse("tool_choice", "must be \"auto\" or \"none\": others are not supported",
                kUnsupported);
  }
}

}  // namespace poise
