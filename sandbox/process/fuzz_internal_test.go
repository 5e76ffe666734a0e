package process

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// FuzzControl sends arbitrary requests to the process of a VM that has just gone to sleep. The process must answer
// each one, change nothing, and report an error that can be passed on. A body that changes a record must leave a
// valid record, or the old one.
func FuzzControl(f *testing.F) {
	methods := []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}
	orders := []string{"sleep", "snapshot", "policy", "tags", "secrets", "remove-secrets", "service", "remove-service", "none"}
	f.Add(uint8(1), uint8(0), []byte(`{"hooks":"skip"}`))
	f.Add(uint8(1), uint8(1), []byte(`{"note":"x","hooks":"require","disk_only":true}`))
	f.Add(uint8(1), uint8(2), []byte(`{"version":1,"rules":[]}`))
	f.Add(uint8(1), uint8(3), []byte(`{"add":["a"],"remove":["b"]}`))
	f.Add(uint8(1), uint8(4), []byte(`[{"name":"a","value":"eA=="}]`))
	f.Add(uint8(1), uint8(5), []byte(`["a"]`))
	f.Add(uint8(1), uint8(6), []byte(`{"name":"web","argv":["true"],"restart":"always"}`))
	f.Add(uint8(1), uint8(7), []byte(`"web"`))
	f.Add(uint8(0), uint8(0), []byte{})
	f.Fuzz(func(t *testing.T, method, order uint8, body []byte) {
		if len(body) > maxFuzzed {
			return
		}
		r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "a", Services: []spec.Service{{Name: "kept", Argv: []string{"true"}}}}}
		p := &process{store: &state.Store{}, log: slog.New(slog.DiscardHandler), r: r, asleep: true}
		where := control.Orders + orders[int(order)%len(orders)]
		req := httptest.NewRequestWithContext(t.Context(), methods[int(method)%len(methods)], where, bytes.NewReader(body))
		before, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		w := httptest.NewRecorder()
		p.control().Handler.ServeHTTP(w, req)
		after, err := json.Marshal(r)
		if err != nil || !bytes.Equal(before, after) {
			t.Errorf("the record was changed: %s", after)
		}
		var said control.ErrorReport
		switch w.Code {
		case http.StatusNotFound, http.StatusMethodNotAllowed:
		case http.StatusInternalServerError:
			if err := json.Unmarshal(w.Body.Bytes(), &said); err != nil || said.Code == "" || said.Message == "" || w.Body.Len() > len(body)*6+1024 {
				t.Errorf("%s %s: %d bytes, %v: %.200s", req.Method, where, w.Body.Len(), err, w.Body)
			}
		default:
			t.Errorf("%s %s of one that sleeps: %d %.200s", req.Method, where, w.Code, w.Body)
		}
		// What a body changes in a record.
		var service spec.Service
		if json.Unmarshal(body, &service) == nil {
			if err := r.SetService(service); err == nil {
				if err := spec.ValidateServices(r.Spec.Services); err != nil || state.FindService(r.Spec.Services, service.Name) < 0 || state.FindService(r.Spec.Services, "kept") < 0 {
					t.Errorf("services %+v: %v", r.Spec.Services, err)
				}
			} else if len(r.Spec.Services) != 1 || !reflect.DeepEqual(r.Spec.Services[0], spec.Service{Name: "kept", Argv: []string{"true"}}) {
				t.Errorf("what was refused (%v) has changed services: %+v", err, r.Spec.Services)
			}
		}
		var tags spec.TagChange
		if json.Unmarshal(body, &tags) == nil && tags.Validate() == nil {
			old := r.Spec.Tags
			if err := r.Spec.UseTags(tags); err != nil && !reflect.DeepEqual(r.Spec.Tags, old) {
				t.Errorf("what was refused (%v) has changed tags: %q", err, r.Spec.Tags)
			}
		}
		var name string
		if json.Unmarshal(body, &name) == nil {
			_ = r.DropService(name)
			if err := spec.ValidateServices(r.Spec.Services); err != nil {
				t.Errorf("without one: %v", err)
			}
		}
	})
}

// maxFuzzed bounds the bodies of FuzzControl, in bytes.
const maxFuzzed = control.MaxOrder + 1024
