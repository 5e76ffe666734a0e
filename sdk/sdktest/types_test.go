package sdktest

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the generated types")

// schema is the part of JSON Schema that the OpenAPI document uses.
type schema struct {
	Ref         string             `json:"$ref"`
	Description string             `json:"description"`
	Type        any                `json:"type"` // a string, or several
	Enum        []any              `json:"enum"`
	Properties  map[string]*schema `json:"properties"`
	Required    []string           `json:"required"`
	Items       *schema            `json:"items"`
	Additional  any                `json:"additionalProperties"` // false, true or a schema
}

// types returns the schema's types, and whether null is one.
func (s *schema) types() (out []string, null bool) {
	switch is := s.Type.(type) {
	case string:
		out = []string{is}
	case []any:
		for _, one := range is {
			if one == "null" {
				null = true
				continue
			}
			out = append(out, fmt.Sprint(one))
		}
	}
	return out, null
}

func (s *schema) names() []string { return slices.Sorted(maps.Keys(s.Properties)) }

// document has the named schemas.
type document map[string]*schema

func read(t *testing.T) document {
	t.Helper()
	text, err := os.ReadFile("../../sandbox/api/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Components struct {
			Schemas document `json:"schemas"`
		} `json:"components"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	return d.Components.Schemas
}

// named returns the name of a schema that is written out inside another, if it has one.
func (d document) named(s *schema) string {
	if s.Ref != "" {
		return s.Ref[strings.LastIndex(s.Ref, "/")+1:]
	}
	if len(s.Properties) < 3 {
		return ""
	}
	for _, name := range slices.Sorted(maps.Keys(d)) {
		if is := d[name]; is != s && reflect.DeepEqual(is.Properties, s.Properties) && reflect.DeepEqual(is.Required, s.Required) && !strings.HasSuffix(name, "Line") {
			return name
		}
	}
	return ""
}

// enum returns the values of an enumeration as literals.
func enum(s *schema) (out []string, null bool) {
	for _, v := range s.Enum {
		if v == nil {
			null = true
			continue
		}
		text, _ := json.Marshal(v)
		out = append(out, string(text))
	}
	return out, null
}

var isName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

func quoted(name string) string {
	if isName.MatchString(name) {
		return name
	}
	return fmt.Sprintf("%q", name)
}

// typescript returns the type of a schema.
func (d document) typescript(s *schema, indent string, top bool) string {
	if name := d.named(s); name != "" && !top {
		return name
	}
	kinds, null := s.types()
	var alt []string
	if len(s.Enum) > 0 {
		var also bool
		alt, also = enum(s)
		null = null || also
	} else {
		for _, k := range kinds {
			switch k {
			case "integer", "number":
				alt = append(alt, "number")
			case "array":
				alt = append(alt, "Array<"+d.typescript(s.Items, indent, false)+">")
			case "object":
				alt = append(alt, d.tsObject(s, indent))
			default:
				alt = append(alt, k)
			}
		}
	}
	if len(alt) == 0 {
		alt = []string{"unknown"}
	}
	if null {
		alt = append(alt, "null")
	}
	return strings.Join(alt, " | ")
}

func (d document) tsObject(s *schema, indent string) string {
	if len(s.Properties) == 0 {
		if more, ok := s.Additional.(map[string]any); ok && more["type"] == "number" {
			return "Record<string, number>"
		} else if ok && more["type"] == "string" {
			return "Record<string, string>"
		}
		if s.Additional == false {
			return "Record<string, never>"
		}
		return "Record<string, unknown>"
	}
	var b strings.Builder
	b.WriteString("{\n")
	for _, name := range s.names() {
		p := s.Properties[name]
		if p.Description != "" {
			fmt.Fprintf(&b, "%s  /** %s */\n", indent, p.Description)
		}
		mark := "?"
		if slices.Contains(s.Required, name) {
			mark = ""
		}
		fmt.Fprintf(&b, "%s  %s%s: %s;\n", indent, quoted(name), mark, d.typescript(p, indent+"  ", false))
	}
	b.WriteString(indent + "}")
	return b.String()
}

// python writes classes for schemas.
type python struct {
	d   document
	out strings.Builder
}

// of returns the type of a schema, and writes the classes that it needs, which are called name and more.
func (w *python) of(s *schema, name string, top bool) string {
	if is := w.d.named(s); is != "" && !top {
		return is
	}
	kinds, null := s.types()
	var alt []string
	if len(s.Enum) > 0 {
		values, also := enum(s)
		null = null || also
		alt = []string{"Literal[" + strings.Join(values, ", ") + "]"}
	} else {
		for _, k := range kinds {
			switch k {
			case "integer":
				alt = append(alt, "int")
			case "number":
				alt = append(alt, "float")
			case "boolean":
				alt = append(alt, "bool")
			case "string":
				alt = append(alt, "str")
			case "array":
				alt = append(alt, "list["+w.of(s.Items, name+"Item", false)+"]")
			case "object":
				alt = append(alt, w.object(s, name))
			}
		}
	}
	if len(alt) == 0 {
		alt = []string{"Any"}
	}
	if null {
		alt = append(alt, "None")
	}
	return strings.Join(alt, " | ")
}

func camel(name string) string {
	var b strings.Builder
	for word := range strings.SplitSeq(name, "_") {
		if word != "" {
			b.WriteString(strings.ToUpper(word[:1]) + word[1:])
		}
	}
	return b.String()
}

func (w *python) object(s *schema, name string) string {
	if len(s.Properties) == 0 {
		return "dict[str, Any]"
	}
	var fields []string
	for _, p := range s.names() {
		is := w.of(s.Properties[p], name+camel(p), false)
		is = fmt.Sprintf("%q", is)
		if strings.Contains(is, `\"`) {
			is = "'" + strings.ReplaceAll(is[1:len(is)-1], `\"`, `"`) + "'" // literals have quotes
		}
		if !slices.Contains(s.Required, p) {
			is = "NotRequired[" + is + "]"
		}
		fields = append(fields, fmt.Sprintf("    %q: %s,\n", p, is))
	}
	// The functional form: some names are words of the language.
	fmt.Fprintf(&w.out, "\n%s = TypedDict(\"%s\", {\n%s})\n", name, name, strings.Join(fields, ""))
	return name
}

func TestTypes_of_the_clients_are_those_of_the_document(t *testing.T) {
	d := read(t)
	order := slices.Sorted(maps.Keys(d))
	var ts strings.Builder
	ts.WriteString("// Made from sandbox/api/openapi.json by: go test ./sdk/sdktest -run Types -update\n")
	py := &python{d: d}
	var aliases strings.Builder
	for _, name := range order {
		fmt.Fprintf(&ts, "\nexport type %s = %s;\n", name, d.typescript(d[name], "", true))
		if is := strings.ReplaceAll(py.of(d[name], name, true), " | None", ""); is != name {
			fmt.Fprintf(&aliases, "\n%s = %s\n", name, is)
		}
	}
	head := "# Made from sandbox/api/openapi.json by: go test ./sdk/sdktest -run Types -update\n" +
		"\"\"\"The objects of the API: dicts, as they are sent.\"\"\"\n\n" +
		"from typing import Any, Literal, NotRequired, TypedDict\n"
	for path, want := range map[string]string{
		"../typescript/src/types.ts":    ts.String(),
		"../python/src/drowse/types.py": head + aliases.String() + py.out.String(),
	} {
		if *update {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != want {
			t.Errorf("%s is not current (%v): go test ./sdk/sdktest -run Types -update", path, err)
		}
	}
}
