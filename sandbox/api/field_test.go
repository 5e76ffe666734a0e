package api_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// wrongFor returns a value that is of another type than a schema's; nil if it takes any.
func wrongFor(s *jsonschema.Schema) any {
	types := append(slices.Clone(s.Types), s.Type)
	switch {
	case slices.Contains(types, "string") || slices.Contains(types, "boolean") || slices.Contains(types, "array"):
		return 5
	case slices.Contains(types, "integer") || slices.Contains(types, "number") || slices.Contains(types, "object"):
		return "x"
	}
	return nil
}

// whereOf returns the address of an operation of the examples.
func (w *world) whereOf(op operationOf, query url.Values) string {
	where := op.pattern
	for _, p := range op.Parameters {
		text := w.example(fmt.Sprint(p.Example))
		switch {
		case p.In == "path":
			where = strings.ReplaceAll(where, "{"+p.Name+"}", url.PathEscape(text))
		case p.Required && !query.Has(p.Name):
			query.Set(p.Name, text)
		}
	}
	return where + "?" + query.Encode()
}

// refused sends a request that has one thing wrong, and checks that the answer names it.
func (w *world) refused(t *testing.T, op operationOf, query url.Values, body any, field string) {
	t.Helper()
	h, text := http.Header{}, []byte(nil)
	if body != nil {
		h.Set("Content-Type", "application/json")
		var err error
		if text, err = json.Marshal(body); err != nil {
			t.Fatal(err)
		}
	} else {
		for kind, c := range op.RequestBody.Content {
			h.Set("Content-Type", kind)
			text = []byte(w.example(string(c.Example)))
		}
	}
	got := w.ask(t.Context(), op.method, w.whereOf(op, query), h, text)
	var doc wire.ErrorDoc
	if err := json.Unmarshal(got.Body.Bytes(), &doc); err != nil || got.Code != http.StatusBadRequest || doc.Error.Field != field {
		t.Errorf("%s %s %v %.200s: %d %.300s, want 400 and the field %s", op.method, op.pattern, query, text, got.Code, got.Body, field)
	}
}

func TestErrors_name_the_field_of_each_body_and_the_parameter_that_is_wrong(t *testing.T) {
	w := newWorld(t)
	w.reset(t)
	d, err := theDescription()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, op := range operationsOf(t) {
		if op.isSocket() {
			continue
		}
		for _, p := range op.Parameters {
			query := url.Values{}
			switch {
			case p.In != "query" || op.pattern == "/v1/events": // whose query is package events'
				continue
			case p.Schema.Type == "integer":
				query.Set(p.Name, "x")
			case len(p.Schema.Enum) > 0:
				query.Set(p.Name, "none-such")
			case p.Name == "path":
				query.Set(p.Name, "relative")
			default:
				continue
			}
			n++
			w.refused(t, op, query, nil, p.Name)
		}
		c, ok := op.RequestBody.Content["application/json"]
		if !ok || strings.HasSuffix(op.pattern, "/policy") { // its body is a policy, whose errors name a path in it
			continue
		}
		var in func(s *jsonschema.Schema, path []string)
		in = func(s *jsonschema.Schema, path []string) {
			// nested returns the body that has a value below path, and nothing else.
			nested := func(name string, value any) any {
				value = map[string]any{name: value}
				for _, p := range slices.Backward(path) {
					value = map[string]any{p: value}
				}
				return value
			}
			if s.Ref != "" {
				s = d.Components.Schemas[s.Ref[strings.LastIndex(s.Ref, "/")+1:]]
			}
			if len(s.Properties) == 0 && len(path) > 0 {
				return
			}
			n++
			w.refused(t, op, url.Values{}, nested("none_such", 1), strings.Join(append(path, "none_such"), "."))
			for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
				is := s.Properties[name]
				below := append(slices.Clone(path), name)
				if wrong := wrongFor(is); wrong != nil {
					n++
					w.refused(t, op, url.Values{}, nested(name, wrong), strings.Join(below, "."))
				}
				in(is, below)
			}
		}
		in(c.Schema, nil)
	}
	if n < 150 {
		t.Errorf("only %d requests were wrong: is that the document?", n)
	}
}

func TestErrors_name_the_field_whose_value_is_out_of_bounds(t *testing.T) {
	w := newWorld(t)
	w.reset(t)
	obj := func(pairs ...any) map[string]any {
		out := map[string]any{}
		for i := 0; i < len(pairs); i += 2 {
			out[pairs[i].(string)] = pairs[i+1]
		}
		return out
	}
	ops := map[string]operationOf{}
	for _, op := range operationsOf(t) {
		ops[op.method+" "+op.pattern] = op
	}
	const create, web = "POST /v1/sandboxes", "/v1/sandboxes/{name}"
	vm := func(field string, value any) map[string]any {
		return obj("spec", obj("name", "new", "image", "test", field, value))
	}
	netted := func(rule map[string]any) map[string]any {
		return obj("spec", obj("name", "new", "image", "test", "network", "tap", "policy", obj("rules", []any{rule})))
	}
	meta := func(field string, value any) map[string]any {
		return obj("spec", obj("name", "new", "image", "test"), "metadata", obj(field, value))
	}
	for _, c := range []struct {
		op    string
		body  map[string]any
		field string
	}{
		{create, vm("name", "No Name"), "spec.name"}, {create, vm("vcpus", 99), "spec.vcpus"}, {create, vm("memory_mib", 1), "spec.memory_mib"},
		{create, vm("disk_mib", 1), "spec.disk_mib"}, {create, vm("disk_quota_mib", -1), "spec.disk_quota_mib"}, {create, vm("network", "lan"), "spec.network"},
		{create, vm("hostname", "a b"), "spec.hostname"}, {create, vm("ipv6", true), "spec.ipv6"}, {create, vm("image", ""), "spec.image"},
		{create, vm("policy", obj()), "spec.policy"}, {create, vm("tags", []string{"x"}), "spec.tags"}, {create, vm("kernel", "/boot/vmlinuz"), "spec.kernel"},
		{create, vm("idle", obj("sleep_seconds", -1)), "spec.idle.sleep_seconds"}, {create, vm("idle", obj("cpu_percent", 101)), "spec.idle.cpu_percent"},
		{create, vm("hooks", obj("policy", "never")), "spec.hooks.policy"}, {create, vm("hooks", obj("all_seconds", 999)), "spec.hooks.all_seconds"},
		{create, vm("self", obj("allow", []string{"fly"})), "spec.self"}, {create, vm("volumes", []any{obj("name", "v", "path", "etc")}), "spec.volumes"},
		{create, vm("shares", []any{obj("source", "/", "path", "/x")}), "spec.shares"}, {create, vm("services", []any{obj("name", "x")}), "spec.services.argv"},
		{create, netted(obj("direction", "out")), "spec.policy.rules[0].direction"}, {create, netted(obj("direction", "egress", "port", 1)), "spec.policy.rules[0].port"},
		{"PUT " + web + "/policy", obj("rules", []any{obj("direction", "egress"), obj("direction", "egress", "verdict", "allow", "cidrs", []string{"10.0.0.1/8"})}), "rules[1].cidrs[0]"},
		{"PUT " + web + "/policy", obj("rule", 1), "rule"},
		{create, meta("class", "eternal"), "metadata.class"}, {create, meta("owner", "a\nb"), "metadata.owner"}, {create, meta("tags", []string{"a b"}), "metadata.tags"},
		{create, meta("keep", obj("last", -1)), "metadata.keep"}, {create, meta("wake", obj("every_seconds", -1)), "metadata.wake"},
		{create, meta("persist", obj("drop", []string{"x"})), "metadata.persist"}, {create, meta("expires", "2020-01-01T00:00:00Z"), "metadata.expires"},
		{create, meta("gateway", obj("host", "a/b")), "metadata.gateway.host"},
		{"PATCH " + web, obj("tags", []string{""}), "tags"}, {"PATCH " + web, obj("class", "eternal"), "class"}, {"PATCH " + web, obj("wake", obj()), "wake.at"},
		{"POST " + web + "/fork", obj("children", []any{}), "children"}, {"POST " + web + "/fork", obj("children", []any{obj("name", "No")}), "children.name"},
		{"POST " + web + "/migrate", obj("to", ""), "to"}, {"POST " + web + "/rename", obj("to", "No"), "to"}, {"POST " + web + "/extend", obj("until", "0001-01-01T00:00:00Z"), "until"},
		{"POST " + web + "/stop", obj("timeout_seconds", 9999), "timeout_seconds"}, {"POST " + web + "/snapshot", obj("note", "a\nb"), "note"},
		{"POST " + web + "/sleep", obj("hooks", "never"), "hooks"}, {"POST " + web + "/snapshot", obj("hooks", "never"), "hooks"},
		{"POST " + web + "/exec", obj("command", []string{}), "command"}, {"POST " + web + "/exec", obj("command", []string{"x"}, "timeout_seconds", 1<<20), "timeout_seconds"},
		{"POST " + web + "/processes", obj("command", []string{"x"}, "output_kib", -1), "output_kib"}, {"POST " + web + "/processes", obj("command", []string{"x"}, "window", 1), "window"},
		{"POST " + web + "/processes/{process}/signal", obj("signal", 99), "signal"}, {"POST " + web + "/files/mkdir", obj("path", "x"), "path"},
		{"POST " + web + "/files/mkdir", obj("path", "/x", "mode", "9"), "mode"}, {"POST " + web + "/files/move", obj("from", "/x", "to", "y"), "to"},
		{"PUT " + web + "/services/{service}", obj("argv", []string{}), "argv"}, {"PUT " + web + "/services/{service}", obj("argv", []string{"x"}, "stop_signal", 99), "stop_signal"},
		{"POST /v1/volumes", obj("name", "No", "size_mib", 64), "name"}, {"POST /v1/volumes", obj("name", "v", "size_mib", 0), "size_mib"},
		{"POST /v1/images/pull", obj("from", "/etc/passwd"), "from"}, {"POST /v1/images/pull", obj("from", "docker://x", "tag", "A B"), "tag"},
		{"POST /v1/templates", obj("memory_mib", 64), "image"}, {"POST /v1/snapshots/{id}/clone", obj("name", "No"), "name"},
		{"POST /v1/snapshots/{id}/clone", obj("metadata", obj("class", "eternal")), "metadata.class"},
	} {
		w.refused(t, ops[c.op], url.Values{}, c.body, c.field)
	}
	if got := w.ask(t.Context(), http.MethodPost, "/v1/sandboxes/web/stop", nil, nil); got.Code != http.StatusOK {
		t.Fatal(got.Body)
	}
	w.refused(t, ops["PATCH "+web], url.Values{}, obj("memory_mib", 1), "memory_mib")
	w.refused(t, ops["PATCH "+web], url.Values{}, obj("idle", obj("sleep_seconds", -1)), "idle.sleep_seconds")
	for param, value := range map[string]string{"since": "yesterday", "follow": "maybe", "type": "sandbox.flew", "none": "1"} {
		w.refused(t, ops["GET /v1/events"], url.Values{param: {value}}, nil, param)
	}
	// What has no single cause names none, and the client of the Go API passes a field on.
	if got := w.ask(t.Context(), http.MethodPost, "/v1/sandboxes", http.Header{"Content-Type": {"application/json"}}, []byte(`{`)); strings.Contains(got.Body.String(), `"field"`) {
		t.Errorf("no JSON: %s", got.Body)
	}
	err := (wire.Error{Code: "invalid", Message: "x", Field: "spec.vcpus"}).Err()
	if spec.FieldOf(err) != "spec.vcpus" || err.Error() != "x" {
		t.Errorf("the client's error: %v of %q", err, spec.FieldOf(err))
	}
}

// A body whose fields are many, deep or long costs no more than its size to say what is wrong with it.
func TestErrors_of_hostile_bodies_are_found_in_bounded_steps(t *testing.T) {
	w := newWorld(t)
	long := strings.Repeat("k", 1<<19)
	many := `"b":1`
	for i := range 50_000 {
		many += fmt.Sprintf(`,"%d":1`, i)
	}
	for name, body := range map[string]string{
		"many": "{" + many + "}", "long": `{"` + long + `":{` + many[:1<<18] + `"}}`, "deep": strings.Repeat(`{"spec":`, 5000) + "1" + strings.Repeat("}", 5000),
		"many below": `{"spec":{` + many + `}}`,
	} {
		got := w.ask(t.Context(), http.MethodPost, "/v1/sandboxes", http.Header{"Content-Type": {"application/json"}}, []byte(body))
		if got.Code != http.StatusBadRequest || got.Body.Len() > 4<<10+1<<20 {
			t.Errorf("%s: %d and %d bytes", name, got.Code, got.Body.Len())
		}
	}
}
