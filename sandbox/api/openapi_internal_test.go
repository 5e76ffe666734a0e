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
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
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
		reflect.TypeFor[netpolicy.Policy]():       {Type: "object", Description: thePolicy},
		reflect.TypeFor[records.Status]():         enum(records.Statuses...),
		reflect.TypeFor[lifetime.Class]():         enum(append([]lifetime.Class{""}, lifetime.Classes...)...),
		reflect.TypeFor[spec.HookPolicy]():        enum("", spec.HooksRequire, spec.HooksIgnore, spec.HooksSkip),
		reflect.TypeFor[netpolicy.Direction]():    enum("", netpolicy.Egress, netpolicy.Ingress),
		reflect.TypeFor[netpolicy.Verdict]():      enum("", netpolicy.Allow, netpolicy.Deny),
		reflect.TypeFor[guest.Stats]():            {Type: "object", Description: "what the guest says of its use, with the fields of the Go type guest.Stats"},
		reflect.TypeFor[netpolicy.FlowRecord]():   {Type: "object", Description: "a flow, or what was lost of them: docs/reference/network.md"},
		reflect.TypeFor[netpolicy.PortRange]():    text("a port, or two with a hyphen"),
		reflect.TypeFor[netpolicy.CheckedPorts](): text("ports, or none"),
	}
}

// thePolicy marks a policy, whose schema is netpolicy.Schema.
const thePolicy = "a network policy: docs/guides/policy.md describes it"

func enum[T ~string](values ...T) *jsonschema.Schema {
	s := &jsonschema.Schema{Type: "string"}
	for _, v := range values {
		s.Enum = append(s.Enum, string(v))
	}
	return s
}

// enums are fields of package wire whose values are fixed, by schema and field, and field of that one's items.
var enums = map[string][]string{
	"FileInfo.kind": wire.FileKinds, "FileEventLine.event": wire.FileEvents, "Operation.state": wire.OperationStates,
	"Directory.entries.kind": wire.FileKinds, "Operations.operations.state": wire.OperationStates, "SecretSources.sources.kind": wire.SecretSourceKinds,
	"Template.state": wire.TemplateStates, "Templates.templates.state": wire.TemplateStates,
	"DiffLine.op": {"added", "changed", "removed"}, "Is.scope": {"read", "write"},
	"Control.type": {
		wire.ControlStart, wire.ControlResize, wire.ControlSignal, wire.ControlEOF, wire.ControlAck, wire.ControlDetach, wire.ControlStarted, wire.ControlExit, wire.ControlError,
	},
}

// policySchema returns the schema of policies with its definitions in their places.
func policySchema(t *testing.T) object {
	var whole object
	if err := json.Unmarshal(netpolicy.Schema(), &whole); err != nil {
		t.Fatal(err)
	}
	defs, _ := whole["$defs"].(object)
	for _, key := range []string{"$defs", "$id", "$schema"} {
		delete(whole, key)
	}
	var in func(v any) any
	in = func(v any) any {
		switch v := v.(type) {
		case object:
			if ref, ok := v["$ref"].(string); ok {
				return in(defs[strings.TrimPrefix(ref, "#/$defs/")])
			}
			out := object{}
			for key, one := range v {
				out[key] = in(one)
			}
			return out
		case []any:
			out := make([]any, len(v))
			for i, one := range v {
				out[i] = in(one)
			}
			return out
		}
		return v
	}
	is, _ := in(whole).(object)
	return is
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

// examples are those of parameters of paths and queries, and of the bodies of operations. A test sends them.
var examples = object{
	"{name}": "web", "{process}": "job", "{port}": "8080", "{secret}": "key", "{service}": "main", "{id}": anID, "{ref}": "test", "{volume}": "data", "{operation}": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "{template}": "0123abcd",
	"path": "/etc/hostname", "limit": 100, "tail": 4096, "mode": "0644", "offset": 0, "window": 1 << 20, "timeout_seconds": 60, "before": "2030-01-01T00:00:00Z", "uid": 1000, "gid": 1000,
	"format": "tar", "tag": "site", "follow": "1",
	"Range": "bytes=0-1", "If-None-Match": "*", "If-Match": "*", "Idempotency-Key": "2f1a6e",
	"GET /v1/sandboxes/{name}/files/list?path":             "/etc",
	"PUT /v1/sandboxes/{name}/files/tree?path":             "/srv",
	"GET /v1/images/{ref}/export?format":                   "erofs",
	"POST /v1/sandboxes":                                   object{"spec": object{"name": "api", "image": "test", "memory_mib": 256}, "metadata": object{"class": "resumable", "purpose": "a server"}},
	"PATCH /v1/sandboxes/{name}":                           object{"purpose": "a server", "tags": []string{"site"}},
	"POST /v1/sandboxes/{name}/sleep":                      object{"hooks": "skip"},
	"POST /v1/sandboxes/{name}/stop":                       object{"timeout_seconds": 30},
	"POST /v1/sandboxes/{name}/snapshot":                   object{"note": "before the update"},
	"POST /v1/sandboxes/{name}/restore":                    object{"snapshot": anID},
	"POST /v1/sandboxes/{name}/fork":                       object{"children": []object{{"name": "child", "tags": []string{"try"}}}},
	"POST /v1/sandboxes/{name}/migrate":                    object{"to": "other-host"},
	"POST /v1/sandboxes/{name}/rename":                     object{"to": "other"},
	"POST /v1/sandboxes/{name}/extend":                     object{"until": "2100-01-01T00:00:00Z"},
	"POST /v1/sandboxes/{name}/exec":                       object{"command": []string{"true"}, "timeout_seconds": 10},
	"PUT /v1/sandboxes/{name}/policy":                      object{"version": 1, "rules": []object{}},
	"POST /v1/sandboxes/{name}/processes":                  object{"command": []string{"true"}, "process": "once"},
	"POST /v1/sandboxes/{name}/processes/{process}/signal": object{"signal": 15},
	"POST /v1/sandboxes/{name}/files/mkdir":                object{"path": "/srv/data", "parents": true},
	"POST /v1/sandboxes/{name}/files/move":                 object{"from": "/etc/hostname", "to": "/etc/name"},
	"PUT /v1/sandboxes/{name}/secrets/{secret}":            object{"value": "aHVudGVyMg=="},
	"PUT /v1/sandboxes/{name}/services/{service}":          object{"argv": []string{"run"}},
	"POST /v1/snapshots/{id}/clone":                        object{"name": "copy"},
	"POST /v1/snapshots/{id}/tags":                         object{"tags": []string{"golden"}},
	"POST /v1/images/pull":                                 object{"from": "docker://debian:13-slim", "tag": "debian"},
	"POST /v1/volumes":                                     object{"name": "cache", "size_mib": 64},
	"POST /v1/volumes/{volume}/resize":                     object{"size_mib": 128},
	"POST /v1/templates":                                   object{"image": "test", "memory_mib": 256},
	"POST /v1/prune":                                       object{"dry_run": true},
}

// anID stands for a snapshot.
const anID = "0123456789abcdef0123456789abcdef"

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
			if schema["description"] == thePolicy {
				schema = policySchema(t)
			}
			properties, _ := schema["properties"].(object)
			for field, is := range properties {
				if values := enums[name+"."+field]; values != nil {
					is.(object)["enum"] = values
				}
				items, _ := is.(object)["items"].(object)
				of, _ := items["properties"].(object)
				for sub, one := range of {
					if values := enums[name+"."+field+"."+sub]; values != nil {
						one.(object)["enum"] = values
					}
				}
				if is.(object)["description"] == thePolicy {
					properties[field] = object{"$ref": "#/components/schemas/PolicyRequest"}
				}
			}
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
			params = append(params, object{"name": m[1], "in": "path", "required": true, "schema": object{"type": "string"}, "example": examples["{"+m[1]+"}"]})
		}
		for _, q := range rt.query {
			schema := object{"type": "string"}
			if q.integer {
				schema = object{"type": "integer"}
			}
			if q.enum != nil {
				schema["enum"] = q.enum
			}
			if q.many {
				schema = object{"type": "array", "items": schema}
			}
			is := object{"name": q.name, "in": "query", "description": q.says, "schema": schema}
			if q.required {
				is["required"] = true
			}
			if e := examples[rt.method+" "+rt.path+"?"+q.name]; e != nil {
				is["example"] = e
			} else if e := examples[q.name]; e != nil {
				is["example"] = e
			}
			params = append(params, is)
		}
		headers := rt.headers
		if rt.idempotent {
			headers = append(headers, param{name: "Idempotency-Key", says: "at most 255 bytes: within 24 h, the caller's same request with the same key gets the same answer, and another gets 422"})
		}
		for _, h := range headers {
			is := object{"name": h.name, "in": "header", "description": h.says, "schema": object{"type": "string"}}
			if e := examples[h.name]; e != nil {
				is["example"] = e
			}
			params = append(params, is)
		}
		if params != nil {
			op["parameters"] = params
		}
		if rt.takes != nil {
			body := object{"schema": ref(rt.takes, forBodies, "Request")}
			if e := examples[rt.method+" "+rt.path]; e != nil {
				body["example"] = e
			}
			op["requestBody"] = object{"required": rt.needsBody, "content": object{"application/json": body}}
		}
		if rt.takesKind != "" {
			op["requestBody"] = object{"required": true, "content": content(rt.takesKind, object{"type": "string", "format": "binary"})}
		}
		answer := object{"description": "done"}
		if rt.etag {
			answer["headers"] = object{"ETag": object{"description": "its version, for If-Match", "schema": object{"type": "string"}}}
		}
		if rt.socket != nil {
			op["responses"] = object{
				"101":     object{"description": "a WebSocket of subprotocol " + wire.StreamProtocol + ": binary messages are data, text messages the schema Control"},
				"default": failed,
			}
			op["x-websocket"] = object{"subprotocol": wire.StreamProtocol, "text": ref(wire.Control{}, forAnswers, "")}
		} else if rt.lines != nil {
			line := ref(rt.lines, forAnswers, "Line")
			answer["content"] = object{"application/x-ndjson": object{"schema": line}, "text/event-stream": object{"schema": line}}
			answer["description"] = "a JSON object a line, or an event each; an empty line or comment every 15 s without one"
		} else if rt.kind != "" {
			answer["content"] = content(rt.kind, object{"type": "string", "format": "binary"})
		} else {
			answer["content"] = content("application/json", ref(rt.gives, forAnswers, ""))
		}
		responses := object{"200": answer, "default": failed}
		if rt.accepted {
			responses = object{"202": answer, "default": failed}
		}
		if rt.partial {
			responses["206"] = answer
			responses["304"] = object{"description": "the ETag is the same"}
		}
		if rt.created {
			responses["201"] = answer
		}
		if rt.unready {
			responses["503"] = answer
		}
		if rt.socket == nil {
			op["responses"] = responses
		}
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
		"servers":  []object{{"url": "/"}},
		"security": []object{{"token": []string{}}, {"certificate": []string{}}, {}},
		"paths":    paths,
		"components": object{"schemas": schemas, "securitySchemes": object{
			"token":       object{"type": "http", "scheme": "bearer", "description": "over TCP: of the server, or a JSON Web Token of an issuer that it knows; the Unix socket asks for none"},
			"certificate": object{"type": "mutualTLS", "description": "of an authority that the server knows; a token beside it decides alone"},
		}},
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
