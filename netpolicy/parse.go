package netpolicy

import (
	"bytes"
	_ "embed" // the schema
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ErrPolicy is a policy with malformed text or invalid content.
var ErrPolicy = errors.New("invalid policy")

//go:embed schema.json
var schema []byte

// Schema is the JSON schema of policy files, for editors. Parse is stricter.
func Schema() []byte { return bytes.Clone(schema) }

// maxDepth is the most levels of nesting in a policy file.
const maxDepth = 8

// Parse reads a policy from YAML or JSON, strictly: unknown and repeated fields, anchors, aliases, tags and a
// second document are errors that name line and field. An empty text is the policy that denies all. Errors wrap
// ErrPolicy.
func Parse(text []byte) (*Policy, error) {
	var p Policy
	if err := p.parse(text); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPolicy, err)
	}
	if err := p.Validate(); err != nil {
		return nil, err
	}
	return &p, nil
}

func (p *Policy) parse(text []byte) error {
	*p = Policy{}
	if len(text) > MaxFileBytes {
		return fmt.Errorf("%d bytes: a policy has at most %d", len(text), MaxFileBytes)
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	var doc, more yaml.Node
	switch err := d.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	}
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		return errors.New("more than one document: write one policy to a file")
	}
	return p.UnmarshalYAML(&doc)
}

// UnmarshalYAML is as strict as Parse, but does not validate.
func (p *Policy) UnmarshalYAML(n *yaml.Node) error {
	*p = Policy{}
	if n.Kind == yaml.DocumentNode && len(n.Content) == 1 {
		n = n.Content[0]
	}
	if isNull(n) {
		return nil
	}
	if err := checkNode(n, reflect.TypeFor[Policy](), "policy", 0); err != nil {
		return err
	}
	type plain Policy // without this method
	var q plain
	if err := n.Decode(&q); err != nil {
		return err
	}
	*p = Policy(q)
	return nil
}

// UnmarshalJSON is as strict as Parse, but does not validate. Unlike in encoding/json, field names are
// case-sensitive.
func (p *Policy) UnmarshalJSON(text []byte) error {
	*p = Policy{}
	if q, ok := readOwn(text); ok {
		*p = q
		return nil
	}
	if !json.Valid(text) {
		return errors.New("not JSON")
	}
	return p.parse(text)
}

// maxOwn is the longest text that readOwn reads. Shorter ones cannot exceed the limits that checkNode has.
const maxOwn = MaxCIDRs

// readOwn reads a policy that json.Marshal has written, as records have it: each wake reads one, and the YAML parser
// takes several times as long. A text that json.Marshal would not write the same way is left to that parser.
func readOwn(text []byte) (Policy, bool) {
	type plain Policy // without UnmarshalJSON
	var q plain
	if len(text) > maxOwn || json.Unmarshal(text, &q) != nil {
		return Policy{}, false
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		return Policy{}, false
	}
	again, err := json.Marshal(q)
	if err != nil || !bytes.Equal(again, compact.Bytes()) {
		return Policy{}, false
	}
	for _, c := range again {
		if c < ' ' || c > '~' { // YAML has rules of its own for these
			return Policy{}, false
		}
	}
	return Policy(q), true
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// checkNode compares the shape of a node with that of a type, so that errors can name the place. The decoder alone
// is not strict in nested values.
func checkNode(n *yaml.Node, t reflect.Type, where string, depth int) error {
	fail := func(format string, args ...any) error {
		return &FieldError{fieldOf(where), fmt.Errorf("line %d: %s: %s", n.Line, where, fmt.Sprintf(format, args...))}
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case depth > maxDepth:
		return fail("nested too deeply")
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		return fail("anchors and aliases are not allowed")
	case n.Style&yaml.TaggedStyle != 0:
		return fail("tags are not allowed")
	case isNull(n):
		return nil
	}
	_, text := reflect.New(t).Interface().(interface{ UnmarshalText([]byte) error })
	switch {
	case text || t.Kind() != reflect.Struct && t.Kind() != reflect.Slice:
		if n.Kind != yaml.ScalarNode {
			return fail("one value belongs here")
		}
		if t.Kind() == reflect.String && n.ShortTag() != "!!str" {
			return fail("%q is not text: put it into quotes", n.Value)
		}
		// Each scalar is decoded alone, so that the error names its place.
		if err := n.Decode(reflect.New(t).Interface()); err != nil {
			return fail("%s", strings.TrimPrefix(err.Error(), "yaml: "))
		}
	case t.Kind() == reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			return fail("a list belongs here")
		}
		if len(n.Content) > MaxCIDRs {
			return fail("%d entries: at most %d", len(n.Content), MaxCIDRs)
		}
		for i, e := range n.Content {
			if isNull(e) {
				return &FieldError{fmt.Sprintf("%s[%d]", where, i), fmt.Errorf("line %d: %s[%d]: an empty entry: remove it", e.Line, where, i)}
			}
			if err := checkNode(e, t.Elem(), fmt.Sprintf("%s[%d]", where, i), depth+1); err != nil {
				return err
			}
		}
	default:
		if n.Kind != yaml.MappingNode {
			return fail("fields belong here")
		}
		fields := fieldsOf(t)
		seen := map[string]bool{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			at := where + "." + k.Value
			if where == "policy" {
				at = k.Value
			}
			f, ok := fields[k.Value]
			switch {
			case k.Kind != yaml.ScalarNode || !ok:
				return &FieldError{fieldOf(at), fmt.Errorf("line %d: %.80q: there is no such field", k.Line, at)}
			case seen[k.Value]:
				return &FieldError{at, fmt.Errorf("line %d: %s: the field is there twice", k.Line, at)}
			}
			seen[k.Value] = true
			if err := checkNode(v, f, at, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// maxField bounds a FieldError.Field, whose end may be a stranger's word, in bytes.
const maxField = 80

// fieldOf is the field of a place. The policy itself is none.
func fieldOf(where string) string {
	if where == "policy" {
		return ""
	}
	return strings.ToValidUTF8(where[:min(len(where), maxField)], "")
}

// fieldsOf maps the YAML names of a struct's fields to their types.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
		fields[name] = t.Field(i).Type
	}
	return fields
}
