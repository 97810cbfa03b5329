// The fields that give an answer a form: "response_format" (OpenAI's) and "structured_outputs" (vLLM's StructuredOutputsParams).
// What they mean is said to the process of grammars (planner/links/grammar_link.h) in the line's own words and order, because a JSON
// schema's properties come in the order in which it names them.

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "common/device_memory.h"
#include "common/trouble.h"
#include "planner/requests/request_body.h"

namespace poise {
namespace {

constexpr std::size_t kLongestGrammar = 1 << 20;
constexpr const char* kFormat = "response_format";
constexpr const char* kOutputs = "structured_outputs";
constexpr std::array kForms{"json", "regex", "choice", "grammar", "json_object"};
constexpr std::array kSwitches{"disable_any_whitespace", "disable_additional_properties"};
constexpr std::array kNotFollowed{"structural_tag", "whitespace_pattern"};

// Writes the value of one field of a line's body as JSON again, with its keys in their order.
class FieldText : public nlohmann::json::json_sax_t {
 public:
  explicit FieldText(std::string_view name) : name_(name) {}
  std::string take() { return std::move(text_); }

  bool null() override { return value("null"); }
  bool boolean(bool is) override { return value(is ? "true" : "false"); }
  bool number_integer(number_integer_t number) override { return value(std::to_string(number)); }
  bool number_unsigned(number_unsigned_t number) override { return value(std::to_string(number)); }
  bool number_float(number_float_t, const string_t& text) override { return value(text); }
  bool string(string_t& text) override { return copies_ ? value(quoted(text)) : value(""); }
  bool binary(binary_t&) override { return false; }
  bool key(string_t& name) override {
    if (copies_) {
      separate();
      text_ += quoted(name) + ":";
      comma_ = false;
    } else if (depth_ == 1) {
      in_body_ = name == "body";
    } else if (depth_ == 2 && in_body_) {
      copies_ = name == name_;
    }
    return true;
  }
  bool start_object(std::size_t) override { return start('{'); }
  bool end_object() override { return end('}'); }
  bool start_array(std::size_t) override { return start('['); }
  bool end_array() override { return end(']'); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
  static std::string quoted(const std::string& text) { return nlohmann::json(text).dump(); }
  void separate() { text_ += comma_ ? "," : ""; }
  bool value(const std::string& text) {
    if (copies_) {
      separate();
      text_ += text;
      comma_ = true;
      ends();
    }
    return true;
  }
  bool start(char bracket) {
    if (copies_) {
      separate();
      text_ += bracket;
      comma_ = false;
    }
    ++depth_;
    return true;
  }
  bool end(char bracket) {
    --depth_;
    if (copies_) {
      text_ += bracket;
      comma_ = true;
      ends();
    }
    return true;
  }
  void ends() { copies_ = depth_ > 2; }

  const std::string_view name_;
  std::string text_;
  int depth_ = 0;  // of objects and lists that are open
  bool in_body_ = false, copies_ = false, comma_ = false;
};

// Null counts as absent.
const nlohmann::json* given(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

// Whether it asks for more than text.
bool check_format(const RequestFields& body, const nlohmann::json& format) {
  const nlohmann::json* type = format.is_object() ? given(format, "type") : nullptr;
  if (type == nullptr || !type->is_string()) {
    body.refuse(kFormat,
                fmt::format("must be an object with a \"type\", not {}", described(format)));
  }
  if (*type == "text") {
    return false;
  }
  if (*type == "json_schema") {
    const nlohmann::json* named = given(format, "json_schema");
    const nlohmann::json* schema =
        named != nullptr && named->is_object() ? given(*named, "schema") : nullptr;
    if (schema == nullptr || !schema->is_object()) {
      body.refuse(
          kFormat,
          "of type \"json_schema\" must have a \"json_schema\" with a \"schema\", an object");
    }
  } else if (*type != "json_object") {
    body.refuse(kFormat,
                fmt::format("must be of type \"text\", \"json_object\" or \"json_schema\": {} is "
                            "not supported",
                            described(*type)),
                kUnsupported);
  }
  return true;
}

void check_form(const RequestFields& body, std::string_view name, const nlohmann::json& form) {
  const auto is_text = [](const nlohmann::json& value) {
    return value.is_string() && !value.get_ref<const std::string&>().empty();
  };
  const char* rule = nullptr;
  if (name == "json" && !form.is_object() && !is_text(form)) {
    rule = "a JSON schema: an object, or its text";
  } else if ((name == "regex" || name == "grammar") && !is_text(form)) {
    rule = "a text that is not empty";
  } else if (name == "json_object" && !form.is_boolean()) {
    rule = "true or false";
  } else if (name == "choice" &&
             (!form.is_array() || form.empty() || !std::ranges::all_of(form, is_text))) {
    rule = "a list of texts, none of them empty";
  }
  if (rule != nullptr) {
    body.refuse(kOutputs,
                fmt::format("must have as \"{}\" {}, not {}", name, rule, described(form)));
  }
}

void check_outputs(const RequestFields& body, const nlohmann::json& outputs) {
  if (!outputs.is_object()) {
    body.refuse(kOutputs, fmt::format("must be an object, not {}", described(outputs)));
  }
  for (const char* name : kNotFollowed) {
    if (given(outputs, name) != nullptr) {
      body.refuse(kOutputs, fmt::format("has a \"{}\", which is not supported", name),
                  kUnsupported);
    }
  }
  for (const char* name : kSwitches) {
    const nlohmann::json* value = given(outputs, name);
    if (value != nullptr && !value->is_boolean()) {
      body.refuse(kOutputs, fmt::format("must have as \"{}\" true or false, not {}", name,
                                        described(*value)));
    }
  }
  int forms = 0;
  for (const char* name : kForms) {
    if (const nlohmann::json* form = given(outputs, name)) {
      check_form(body, name, *form);
      forms += *form == false ? 0 : 1;
    }
  }
  if (forms != 1) {
    body.refuse(kOutputs,
                fmt::format("must have one of \"json\", \"regex\", \"choice\", \"grammar\" and "
                            "\"json_object\", not {}",
                            forms));
  }
}

}  // namespace

void read_grammar(const RequestFields& body, std::string_view line, const RequestRules& rules,
                  Request& request) {
  const nlohmann::json* format = body.find(kFormat);
  const nlohmann::json* outputs = body.find(kOutputs);
  format = format != nullptr && check_format(body, *format) ? format : nullptr;
  if (outputs != nullptr) {
    check_outputs(body, *outputs);
  }
  if (format == nullptr && outputs == nullptr) {
    return;
  }
  const char* name = outputs != nullptr ? kOutputs : kFormat;
  if (format != nullptr && outputs != nullptr) {
    body.refuse(kOutputs, "cannot be given together with \"response_format\": leave one out");
  }
  if (rules.tokenizer == nullptr) {
    body.refuse(name, "needs a tokenizer: the run has none (--skip-tokenizer-init)");
  }
  if (rules.eos.empty()) {
    body.refuse(name,
                "cannot be followed: the model's config.json names no EOS token that would "
                "end the answer",
                kUnsupported);
  }
  if (request.sampling.ignore_eos) {
    body.refuse("ignore_eos",
                fmt::format("must be false with \"{}\": EOS ends such an answer", name));
  }
  if (request.sampling.score_from > 0) {
    body.refuse("score_from", fmt::format("generates nothing: leave out \"{}\"", name));
  }
  FieldText text(name);
  nlohmann::json::sax_parse(line, &text);
  auto grammar = std::make_shared<Grammar>(
      Grammar{.param = name, .text = fmt::format("{{\"{}\":{}}}", name, text.take())});
  if (grammar->text.size() > kLongestGrammar) {
    body.refuse(name, fmt::format("is {} bytes long; at most {} are followed", grammar->text.size(),
                                  kLongestGrammar));
  }
  LogitWishes wishes = request.sampling.wishes ? *request.sampling.wishes : LogitWishes();
  wishes.grammar = std::move(grammar);
  wishes.mask_edits = mask_edits(rules.vocab_size);
  request.sampling.wishes = std::make_shared<const LogitWishes>(std::move(wishes));
}

}  // namespace poise
