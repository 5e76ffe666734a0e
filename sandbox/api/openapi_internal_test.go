package api

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/http"
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

var update = flag.Bool("update", false, "write openapi.json")

// schemasOf returns schemas for types whose JSON the library cannot derive, since they encode themselves, and for
// types that other documents describe.
func schemasOf() map[reflect.Type]*jsonschema.Schema {
	text := func(says string) *jsonschema.Schema { return &jsonschema.Schema{Type: "string", Description: says} }
	return map[reflect.Type]*jsonschema.Schema{
		reflect.TypeFor[netip.Addr]():             text("an IP address, or empty"),
		reflect.TypeFor[netip.AddrPort]():         text("an IP address and a port"),
		reflect.TypeFor[netpolicy.Reason]():       text("why a packet passed or did not"),
		reflect.TypeFor[[]byte]():                 text("base64"),
		reflect.TypeFor[netpolicy.Policy]():       {Type: "object", Description: "a network policy: `drowse policy schema` prints its schema, and docs/guides/policy.md describes it"},
		reflect.TypeFor[guest.Stats]():            {Type: "object", Description: "what the guest says of its use, with the fields of the Go type guest.Stats"},
		reflect.TypeFor[netpolicy.FlowRecord]():   {Type: "object", Description: "a flow, or what was lost of them: docs/reference/network.md"},
		reflect.TypeFor[netpolicy.PortRange]():    text("a port, or two with a hyphen"),
		reflect.TypeFor[netpolicy.CheckedPorts](): text("ports, or none"),
	}
}

// forAnswers allows additional fields.
func forAnswers(schema object) { delete(schema, "additionalProperties") }

// forBodies makes every field optional. The server reports what a request lacks.
func forBodies(schema object) { delete(schema, "required") }

// everywhere applies change to a schema and the schemas in it.
func everywhere(v any, change func(object)) {
	switch v := v.(type) {
	case object:
		if additional, ok := v["additionalProperties"]; ok && v["properties"] == nil {
			everywhere(additional, change) // a map's elements
		} else {
			change(v)
		}
		everywhere(v["items"], change)
		if properties, ok := v["properties"].(object); ok {
			for _, p := range properties {
				everywhere(p, change)
			}
		}
	}
}

type object = map[string]any

// describe makes the description from the routes.
func describe(t *testing.T) []byte {
	schemas := object{}
	ref := func(v any, change func(object), suffix string) object {
		typ := reflect.TypeOf(v)
		name := strings.ToUpper(typ.Name()[:min(1, len(typ.Name()))]) + typ.Name()[min(1, len(typ.Name())):] + suffix
		if typ.Name() == "" {
			name = "Object"
		}
		if schemas[name] == nil {
			s, err := jsonschema.ForType(typ, &jsonschema.ForOptions{TypeSchemas: schemasOf()})
			if err != nil {
				t.Fatalf("%v: %v", typ, err)
			}
			text, err := json.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			var schema object
			if err := json.Unmarshal(text, &schema); err != nil {
				t.Fatal(err)
			}
			everywhere(schema, change)
			schemas[name] = schema
		}
		return object{"$ref": "#/components/schemas/" + name}
	}
	content := func(kind string, schema object) object { return object{kind: object{"schema": schema}} }
	paths := object{}
	inPath := regexp.MustCompile(`\{([a-z]+)\}`)
	failed := object{"description": "what failed, and what to do about it", "content": content("application/json", ref(wire.ErrorDoc{}, forAnswers, ""))}
	schemas["Error"] = schemas["ErrorDoc"]
	delete(schemas, "ErrorDoc")
	failed["content"] = content("application/json", object{"$ref": "#/components/schemas/Error"})
	for _, rt := range routes() {
		op := object{"summary": rt.says, "operationId": strings.ToLower(rt.method) + regexp.MustCompile(`[^a-z]+`).ReplaceAllString(strings.TrimPrefix(rt.path, "/v1"), "_")}
		var params []object
		for _, m := range inPath.FindAllStringSubmatch(rt.path, -1) {
			params = append(params, object{"name": m[1], "in": "path", "required": true, "schema": object{"type": "string"}})
		}
		for _, q := range rt.query {
			schema := object{"type": "string"}
			if q.integer {
				schema = object{"type": "integer"}
			}
			if q.many {
				schema = object{"type": "array", "items": schema}
			}
			params = append(params, object{"name": q.name, "in": "query", "description": q.says, "schema": schema})
		}
		if params != nil {
			op["parameters"] = params
		}
		if rt.takes != nil {
			op["requestBody"] = object{"required": rt.needsBody, "content": content("application/json", ref(rt.takes, forBodies, "Request"))}
		}
		answer := object{"description": "done"}
		if rt.kind != "" {
			answer["content"] = content(rt.kind, object{"type": "string", "format": "binary"})
		} else {
			answer["content"] = content("application/json", ref(rt.gives, forAnswers, ""))
		}
		responses := object{"200": answer, "default": failed}
		if rt.created {
			responses["201"] = answer
		}
		if rt.unready {
			responses["503"] = answer
		}
		op["responses"] = responses
		switch rt.scope {
		case ScopeNone:
			op["security"] = []object{}
		default:
			op["description"] = "A token wants scope " + string(rt.scope) + "."
		}
		p, _ := paths[rt.path].(object)
		if p == nil {
			p = object{}
			paths[rt.path] = p
		}
		p[strings.ToLower(rt.method)] = op
	}
	text, err := json.MarshalIndent(object{
		"openapi": "3.1.0",
		"info": object{
			"title": "drowse", "version": strconv.Itoa(wire.Version), "license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"},
			"description": "Sandboxes that sleep. Fields are added to answers, and never change their meaning; a field of a request that does not exist is an error.",
		},
		"servers":    []object{{"url": "/"}},
		"security":   []object{{"token": []string{}}, {}},
		"paths":      paths,
		"components": object{"schemas": schemas, "securitySchemes": object{"token": object{"type": "http", "scheme": "bearer", "description": "over TCP; the Unix socket asks for none"}}},
	}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(text, '\n')
}

func TestOpenAPI_is_what_routes_and_types_say(t *testing.T) {
	want := describe(t)
	if *update {
		if err := os.WriteFile("openapi.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(want, openAPI) {
		t.Error("openapi.json is not what the routes and types say: go test ./sandbox/api -run OpenAPI -update")
	}
}

func TestOpenAPI_has_every_route_and_every_path_of_it_is_routed(t *testing.T) {
	var d struct {
		Paths map[string]map[string]any `json:"paths"`
	}
	if err := json.Unmarshal(openAPI, &d); err != nil {
		t.Fatal(err)
	}
	s := New(Options{Host: &sandbox.Host{}})
	var described, routed []string
	for path, methods := range d.Paths {
		for method := range methods {
			method = strings.ToUpper(method)
			described = append(described, method+" "+path)
			req, err := http.NewRequest(method, regexp.MustCompile(`\{[a-z]+\}`).ReplaceAllString(path, "x"), nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, pattern := s.mux.Handler(req); pattern != method+" "+path {
				t.Errorf("%s %s is served by %q", method, path, pattern)
			}
		}
	}
	for _, rt := range routes() {
		routed = append(routed, rt.method+" "+rt.path)
	}
	slices.Sort(described)
	slices.Sort(routed)
	if !slices.Equal(described, routed) {
		t.Errorf("described %q, routed %q", described, routed)
	}
}

func TestStatuses_every_code_that_a_caller_can_cause_has_one_of_its_own(t *testing.T) {
	for code, status := range statuses {
		if status < 400 || http.StatusText(status) == "" {
			t.Errorf("%s has status %d", code, status)
		}
	}
	if StatusOf("no-such-code") != http.StatusInternalServerError {
		t.Error("an unknown code is not the server's fault")
	}
}
