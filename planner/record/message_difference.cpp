#include "planner/record/message_difference.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "common/messages_bfbs_generated.h"
#include "common/trouble.h"

namespace poise {
namespace {

namespace fb = flatbuffers;

// What differs between two runs of the same work.
constexpr std::array<std::pair<std::string_view, std::string_view>, 20> kOfOneRun{{
    {"Message", "seq"},
    {"Message", "planner_epoch"},
    {"Message", "executor_epoch"},
    {"Message", "run_id"},
    {"Configure", "log_began_ns"},
    {"Configure", "trace"},       // changes reports, not the work
    {"Configure", "gpu_memory"},  // without a cap, what was free
    {"Ready", "device_began_ns"},
    {"Ready", "link_bytes_per_s"},
    {"Iteration", "pool_epoch"},
    {"PoolGrant", "pool_epoch"},
    {"LayerDone", "order"},
    {"LayerDone", "spans"},
    {"LayerDone", "waits"},
    {"LayerDone", "rested_ns"},
    {"LayerDone", "host_wait_ns"},
    {"StreamReport", "busy_ns"},
    {"StreamReport", "wait_ns"},
    {"MiniBatchReport", "compute_ns"},
    {"Rejected", "order"},
}};

// "LayerDone" of "poise.messages.LayerDone".
std::string_view short_name(const reflection::Object& object) {
  const std::string_view name = object.name()->string_view();
  return name.substr(name.rfind('.') + 1);
}

bool is_scalar(reflection::BaseType type) {
  return type >= reflection::UType && type <= reflection::Double;
}

bool is_real(reflection::BaseType type) {
  return type == reflection::Float || type == reflection::Double;
}

}  // namespace

// One comparison: goes through both messages at once, and stops at the first difference.
struct MessageComparison::Walk {
  const MessageComparison& comparison;
  std::string path{};
  std::optional<FieldDifference> found{};

  const reflection::Object& object_of(const reflection::Type& type) const {
    return *comparison.schema_->objects()->Get(static_cast<fb::uoffset_t>(type.index()));
  }
  const Fields& fields_of(const reflection::Type& type) const {
    return comparison.fields_[static_cast<std::size_t>(type.index())];
  }
  void differs(std::string a, std::string b) {
    found = FieldDifference{.path = path, .a = std::move(a), .b = std::move(b)};
  }
  // Runs `compare` with `step` behind the path.
  template <typename Compare>
  void within(const std::string& step, Compare&& compare) {
    const std::size_t before = path.size();
    path += (path.empty() || step.front() == '[' ? "" : ".") + step;
    compare();
    path.resize(before);
  }

  std::string text(const reflection::Type& type, reflection::BaseType base, std::int64_t value) {
    if (base == reflection::Bool) {
      return value != 0 ? "true" : "false";
    }
    if (type.index() >= 0) {
      const auto* names =
          comparison.schema_->enums()->Get(static_cast<fb::uoffset_t>(type.index()));
      for (const reflection::EnumVal* one : *names->values()) {
        if (one->value() == value) {
          return one->name()->str();
        }
      }
    }
    return base == reflection::ULong ? fmt::format("{}", static_cast<std::uint64_t>(value))
                                     : fmt::format("{}", value);
  }

  void scalar(const reflection::Type& type, reflection::BaseType base, const std::uint8_t* a,
              const std::uint8_t* b) {
    if (std::memcmp(a, b, fb::GetTypeSize(base)) == 0) {
      return;
    }
    if (is_real(base)) {
      differs(fmt::format("{:.9g}", fb::GetAnyValueF(base, a)),
              fmt::format("{:.9g}", fb::GetAnyValueF(base, b)));
    } else {
      differs(text(type, base, fb::GetAnyValueI(base, a)),
              text(type, base, fb::GetAnyValueI(base, b)));
    }
  }

  void structs(const reflection::Type& type, const std::uint8_t* a, const std::uint8_t* b) {
    const auto size = static_cast<std::size_t>(object_of(type).bytesize());
    if (std::memcmp(a, b, size) == 0) {
      return;
    }
    for (const reflection::Field* field : fields_of(type)) {
      within(field->name()->str(), [&] {
        const std::uint8_t* in_a = a + field->offset();
        const std::uint8_t* in_b = b + field->offset();
        const reflection::Type& inner = *field->type();
        if (inner.base_type() == reflection::Obj) {
          structs(inner, in_a, in_b);
        } else {
          scalar(inner, inner.base_type(), in_a, in_b);
        }
      });
      if (found) {
        return;
      }
    }
  }

  void objects(const reflection::Type& type, const std::uint8_t* a, const std::uint8_t* b) {
    if (a == nullptr || b == nullptr) {
      if (a != b) {
        differs(a != nullptr ? "there" : "absent", b != nullptr ? "there" : "absent");
      }
    } else if (object_of(type).is_struct()) {
      structs(type, a, b);
    } else {
      tables(type, *reinterpret_cast<const fb::Table*>(a), *reinterpret_cast<const fb::Table*>(b));
    }
  }

  void elements(const reflection::Type& type, const fb::VectorOfAny& a, const fb::VectorOfAny& b,
                std::size_t i) {
    const reflection::BaseType element = type.element();
    if (element != reflection::Obj) {
      const std::size_t at = i * fb::GetTypeSize(element);
      scalar(type, element, a.Data() + at, b.Data() + at);
    } else if (object_of(type).is_struct()) {
      const std::size_t at = i * static_cast<std::size_t>(object_of(type).bytesize());
      structs(type, a.Data() + at, b.Data() + at);
    } else {
      tables(type, *fb::GetAnyVectorElemPointer<const fb::Table>(&a, i),
             *fb::GetAnyVectorElemPointer<const fb::Table>(&b, i));
    }
  }

  void vectors(const reflection::Type& type, const fb::VectorOfAny* a, const fb::VectorOfAny* b) {
    const std::size_t sizes[] = {a != nullptr ? a->size() : 0, b != nullptr ? b->size() : 0};
    const bool tables = type.element() == reflection::Obj && !object_of(type).is_struct();
    const std::size_t bytes = type.element() != reflection::Obj ? fb::GetTypeSize(type.element())
                              : tables                          ? 0
                                       : static_cast<std::size_t>(object_of(type).bytesize());
    const std::size_t both = std::min(sizes[0], sizes[1]);
    const bool same =
        both == 0 || (!tables && std::memcmp(a->Data(), b->Data(), both * bytes) == 0);
    for (std::size_t i = 0; !same && i < both && !found; ++i) {
      within(fmt::format("[{}]", i), [&] { elements(type, *a, *b, i); });
    }
    if (!found && sizes[0] != sizes[1]) {
      differs(fmt::format("{} of them", sizes[0]), fmt::format("{} of them", sizes[1]));
    }
  }

  void strings(const fb::String* a, const fb::String* b) {
    const std::string_view texts[] = {a != nullptr ? a->string_view() : "",
                                      b != nullptr ? b->string_view() : ""};
    if (texts[0] != texts[1]) {
      differs(fmt::format("\"{}\"", texts[0]), fmt::format("\"{}\"", texts[1]));
    }
  }

  void field(const reflection::Field& field, const fb::Table& a, const fb::Table& b) {
    const reflection::Type& type = *field.type();
    const reflection::BaseType base = type.base_type();
    if (is_scalar(base)) {
      if (is_real(base)) {
        const double values[] = {fb::GetAnyFieldF(a, field), fb::GetAnyFieldF(b, field)};
        if (std::memcmp(&values[0], &values[1], sizeof(double)) != 0) {
          differs(fmt::format("{:.9g}", values[0]), fmt::format("{:.9g}", values[1]));
        }
        return;
      }
      const std::int64_t values[] = {fb::GetAnyFieldI(a, field), fb::GetAnyFieldI(b, field)};
      if (values[0] != values[1]) {
        differs(text(type, base, values[0]), text(type, base, values[1]));
      }
    } else if (base == reflection::String) {
      strings(fb::GetFieldS(a, field), fb::GetFieldS(b, field));
    } else if (base == reflection::Vector) {
      vectors(type, a.GetPointer<const fb::VectorOfAny*>(field.offset()),
              b.GetPointer<const fb::VectorOfAny*>(field.offset()));
    } else if (base == reflection::Obj && object_of(type).is_struct()) {
      objects(type, a.GetStruct<const std::uint8_t*>(field.offset()),
              b.GetStruct<const std::uint8_t*>(field.offset()));
    } else if (base == reflection::Obj) {
      objects(type, a.GetPointer<const std::uint8_t*>(field.offset()),
              b.GetPointer<const std::uint8_t*>(field.offset()));
    } else {
      check(false, "the schema has no such field beside the body");
    }
  }

  void tables(const reflection::Type& type, const fb::Table& a, const fb::Table& b) {
    for (const reflection::Field* one : fields_of(type)) {
      within(one->name()->str(), [&] { field(*one, a, b); });
      if (found) {
        return;
      }
    }
  }
};

MessageComparison::MessageComparison(Compared compared)
    : schema_(reflection::GetSchema(messages::MessageBinarySchema::data())) {
  std::size_t left_out = 0;
  for (const reflection::Object* object : *schema_->objects()) {
    Fields& fields = fields_.emplace_back();
    for (const reflection::Field* field : *object->fields()) {
      const bool of_one_run =
          std::ranges::find(kOfOneRun, std::pair(short_name(*object),
                                                 field->name()->string_view())) != kOfOneRun.end();
      left_out += of_one_run ? 1 : 0;
      const auto type = field->type()->base_type();
      const bool body = type == reflection::Union || type == reflection::UType;  // compared apart
      if (!body && (!of_one_run || compared == Compared::everything)) {
        fields.push_back(field);
      }
    }
    std::ranges::sort(fields, {}, [](const reflection::Field* field) { return field->id(); });
  }
  check(left_out == kOfOneRun.size(), "the schema has each field that is left out");
}

std::optional<FieldDifference> MessageComparison::first_difference(
    const messages::Message& a, const messages::Message& b) const {
  Walk walk{*this};
  if (a.body_type() != b.body_type()) {
    walk.differs(messages::EnumNameBody(a.body_type()), messages::EnumNameBody(b.body_type()));
    return walk.found;
  }
  const auto* bodies = schema_->enums()->LookupByKey("poise.messages.Body");
  const auto* body = bodies->values()->LookupByKey(static_cast<std::int64_t>(a.body_type()));
  check(body != nullptr, "a verified message has a body of the schema");
  walk.tables(*body->union_type(), *static_cast<const fb::Table*>(a.body()),
              *static_cast<const fb::Table*>(b.body()));
  if (!walk.found) {
    const auto& objects = *schema_->objects();
    for (fb::uoffset_t i = 0; i < objects.size() && !walk.found; ++i) {
      if (objects.Get(i) == schema_->root_table()) {
        for (const reflection::Field* field : fields_[i]) {
          walk.within(field->name()->str(), [&] {
            walk.field(*field, *reinterpret_cast<const fb::Table*>(&a),
                       *reinterpret_cast<const fb::Table*>(&b));
          });
          if (walk.found) {
            break;
          }
        }
      }
    }
  }
  return walk.found;
}

}  // namespace poise
