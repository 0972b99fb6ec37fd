// Form fields for a policy's parameters, from their JSON schema. A field left empty keeps the default.

export function build(parent, policy, values) {
  parent.replaceChildren();
  for (const [name, schema] of Object.entries(policy?.parameters ?? {})) {
    const label = document.createElement("label");
    const given = values[name];
    const field = schema.enum ? choice(schema.enum) : input(schema);
    field.name = name;
    if (given !== undefined) field.value = typeof given === "string" ? given : JSON.stringify(given);
    const usual = policy.values[name] ?? schema.default;
    if (!schema.enum) field.placeholder = usual === undefined || usual === null ? "" : JSON.stringify(usual);
    label.append(name, field);
    parent.append(label);
  }
  if (!parent.children.length) parent.textContent = "This one has none.";
}

// Only what the user set: {} when nothing is.
export function given(parent, policy) {
  const values = {};
  for (const field of parent.querySelectorAll("[name]")) {
    if (field.value === "") continue;
    values[field.name] = kinds(policy.parameters[field.name]).has("string") ? field.value : number(field);
  }
  return values;
}

function number(field) {
  try { return JSON.parse(field.value); } catch { throw new SyntaxError(`${field.name} is ${field.value}; it is a number, true, false, or JSON`); }
}

function kinds(schema) {
  if (schema.enum) return new Set(schema.enum.map((value) => typeof value));
  return new Set((schema.anyOf ?? [schema]).map((each) => each.type));
}

function choice(options) {
  const select = document.createElement("select");
  for (const option of ["", ...options]) select.add(new Option(option === "" ? "(default)" : String(option), option));
  return select;
}

function input(schema) {
  const field = document.createElement("input");
  const only = kinds(schema);
  const numeric = (only.has("number") || only.has("integer")) && !["array", "object", "string"].some((kind) => only.has(kind));
  field.type = numeric ? "number" : "text";
  if (numeric) field.step = "any";
  return field;
}
