// Package sdktest makes the types of the clients in sdk from the OpenAPI document, and runs their tests against a
// server of the API whose VMs are in memory.
package sdktest
