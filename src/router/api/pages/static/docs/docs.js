// Starts Swagger UI on this server's document. Without a validator: that would be a request to another address.

const page = document.getElementById("swagger-ui");

if (window.SwaggerUIBundle) {
  window.SwaggerUIBundle({ url: "api-doc/openapi.json", domNode: page, deepLinking: true, validatorUrl: "none" });
} else {
  page.append("Swagger UI is not installed beside the server (pip install fastapi-offline). The document itself is at ");
  const link = document.createElement("a");
  link.href = "api-doc/openapi.json";
  link.append("api-doc/openapi.json");
  page.append(link);
}
